"""Redaction of texts before they are written, and the header with which nothing of a request is
stored. Proxy and server share this folder. It does no I/O."""
