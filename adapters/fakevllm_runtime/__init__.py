"""Code for processes, files and HTTP servers that the proxy and the swarm server share.

Unlike the package `fakevllm_adapters`, which both share too, this package does I/O. Its main
modules are:

* `errors`: the exceptions whose message a user reads.
* `commands`: the exit codes of commands.
* `http_server`: the listening socket and the uvicorn server.
* `engines`: the packages that each engine needs, and how long its process may take to start.
* `key_file`: the set of API keys, which is reloaded when the key file changes.
* `migrations`: the migrations of an SQLite file.

This package contains nothing about model requests, groups or training.
"""
