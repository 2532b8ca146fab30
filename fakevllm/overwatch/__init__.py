"""`fakevllm overwatch`: show the state of a swarm server on one screen, and control the server with
the keyboard.

The module `poller` reads the server's state, `snapshot` and `history` hold the data, and `render`
draws the data. `app` is the full-screen terminal application. `server_actions` defines the actions
that the user can start on the server, such as a stop of its engine.
"""
