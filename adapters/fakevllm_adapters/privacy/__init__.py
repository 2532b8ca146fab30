"""Redaction of texts before they are written, settings for how long contents are kept, and the
header with which nothing of a request is stored. Proxy and server share this folder. It does no
I/O."""
