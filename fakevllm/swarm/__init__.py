"""The proxy's connection to its swarm server. Model calls use another connection.

* `server_connection` polls the status, starts the engine, and copies the server's run log into the
  ledger, the proxy's database.
* `server_client` sends the other requests, such as the rewards of groups.
* `model_names` knows the names by which apps may request the served model.
* `load_probe` reads how many requests wait in the engine's queue.
* `errors` describes a failed request to the server, and decides whether a retry may help.

A failed request to the server does not end the background tasks of the connection. These tasks send
the next request at the usual time.
"""
