"""Process and file plumbing that the proxy and the swarm server share.

`fakevllm_adapters` does no I/O; this package does. Code that both programs need is here, so that a
change, such as a new limit on connections, is made only once:

* `errors`: the exceptions whose message a user reads.
* `commands`: exit codes of the command lines.
* `http_server`: the listening socket and the uvicorn server.
* `key_file`: the key ring that follows a key file.
* `migrations`: the migrations of an SQLite file.

Nothing here knows about requests, groups or training.
"""
