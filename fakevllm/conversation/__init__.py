"""Which session and turn a request continues, told from what apps send anyway. Pure."""
