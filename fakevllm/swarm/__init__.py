"""The proxy's connection to its swarm server, except for model calls.

* `server_connection` polls the status, starts the engine, sends the rewards of groups, and copies
  the server's run log into the ledger, the proxy's database.
* `load_probe` reads the length of the engine's queue.
* `errors` describes a failed request to the server, and decides whether a retry may help.

A failed request to the server never ends the connection's background tasks. The next poll tries
again.
"""
