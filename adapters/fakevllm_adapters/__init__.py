"""Wire vocabulary shared by the proxy and the swarm server: formats, errors, SSE, keys, protocol
models.

Pure: nothing here opens a socket, reads a clock or knows an event loop.
"""
