"""The proxy's connection to its swarm server, except for model calls.

* `server_connection` polls the status, starts the engine, sends groups, and copies the run log
  into the ledger.
* `load_probe` reads the length of the engine's queue.
* `errors` describes an error of the server, and decides whether a retry may help.

An error of the server never ends the connection's tasks. The next poll tries again.
"""
