"""Redaction of texts before they are written, settings for how long contents are kept, and the
header with which a client asks that nothing of a request is stored. The proxy and the server share
this folder. It does no I/O."""
