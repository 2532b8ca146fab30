"""`fakevllm overwatch`: show a swarm server on one screen, with keys that control the server.

The module `poller` reads the server's state, `snapshot` and `history` hold the data, and `render`
draws the data. `app` is the full-screen terminal application, and `server_actions` has the actions
of the keys.
"""
