"""`fakevllm overwatch`: a swarm server on one screen, and keys that control the server.

`poller` reads the server, `snapshot` and `history` hold the data, `render` draws them, `app` is the
full-screen terminal application, and `server_actions` are the actions of its keys.
"""
