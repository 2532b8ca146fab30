"""The swarm protocol, and the API keys, credentials and error bodies of all requests.

The models define each field of the messages between swarm clients, the proxy and the swarm
server, with the bounds that the server enforces. `errors` builds vLLM's error bodies.

This folder imports no other folder of the package. It reads no files and no clock: the reader of
the key file and the clock are arguments.
"""
