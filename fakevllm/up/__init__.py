"""`fakevllm up` and `fakevllm down`: start and stop server, proxy and console with one file.

`settings` reads `fakevllm.toml` and lets the server check its table `[server]`. `programs` has a
table of the programs to start. `command` runs the programs until a signal stops it, and `readiness`
waits until they answer apps. `detached` starts the command in the background, and `down` stops it.
`log_lines` writes the lines of all programs to one stream.

The programs are processes of their own, started as a user would start them. This folder sends them
nothing but signals. It asks only whether the proxy is healthy, and whether the engine can start.
"""
