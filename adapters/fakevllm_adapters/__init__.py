"""Code that the proxy and the swarm server share. The swarm server is the server that trains.

The package defines API formats, errors, API keys, the settings of a training job, and the messages
between the proxy and the swarm server.

Nothing in this package does I/O: no module opens a socket, reads a clock or runs an event loop.

    protocol/      messages between proxy, clients and swarm server; keys; vLLM's error bodies
    formats/       translation between an app's API format and chat completions
    http/          ASGI functions, access checks and limits on requests
    vllm_compat/   vLLM's request schemas and response bodies, for the bundled engines
    job/           the training job: fields, YAML and checks
"""
