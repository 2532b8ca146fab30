"""The swarm protocol (requests and replies between clients, the proxy and the server that trains),
and the API keys, credentials and error bodies of all requests.

The pydantic models define each field of the protocol's messages, with the bounds that the server
enforces. `errors` builds error bodies in vLLM's form.

This folder imports no other folder of the package. Its modules read no files and no clock. Callers
pass a clock and a function that reads the key file as arguments.
"""
