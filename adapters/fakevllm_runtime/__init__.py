"""Process and file plumbing that the proxy and the swarm server share.

`fakevllm_adapters` does no I/O; this package does. It holds what both programs need in the same
form, so that a change, such as a limit on connections, is made once:

* `errors`: the exceptions whose message a user reads.
* `commands`: exit codes of the command lines.
* `http_server`: the listening socket and the uvicorn server.
* `key_file`: the key ring that follows a key file.
* `migrations`: the migrations of an SQLite file.

Nothing here knows about requests, groups or training.
"""
