"""Privacy code that the proxy and the server share. It redacts texts before they are written. It
defines the settings for how long contents are kept. It also defines the header with which a client
asks that nothing of a request is stored. This folder does no I/O."""
