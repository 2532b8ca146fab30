"""Settings for what is stored of requests, and for how long. Proxy and server share this folder. It
does no I/O."""
