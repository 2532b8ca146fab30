"""Code for processes, files and HTTP servers that the proxy and the swarm server share.

The package `fakevllm_adapters` is shared too, but does no I/O. This package does I/O. Its main
modules are:

* `errors`: the exceptions whose message a user reads.
* `commands`: the exit codes of commands.
* `http_server`: the listening socket and the uvicorn server.
* `engines`: the packages that each engine needs, and the time that an engine's process may take to
  start.
* `path_access`: messages about files and folders that the process may not use.
* `key_file`: the set of API keys, which is reloaded when the key file changes.
* `migrations`: the migrations of an SQLite file.
* `read_only`: connections that only read an SQLite file.
* `contents`: a store for long byte strings in an SQLite file. A part that several byte strings
  share is stored once.

This package contains nothing about model requests, groups or training.
"""
