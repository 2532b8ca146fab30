"""The swarm protocol, and the API keys, credentials and error bodies of all requests.

The swarm protocol defines the requests and replies between clients, the proxy and the server that
trains.

The pydantic models define each field of these messages, with the bounds that the server enforces.
`errors` builds error bodies in vLLM's form.

This folder imports no other folder of the package. Its modules do not read files or clocks.
Instead, callers pass a clock, and a function that reads the key file.
"""
