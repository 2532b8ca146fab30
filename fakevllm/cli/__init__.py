"""The command line `fakevllm`. `main` has most commands; the other modules have one command each.

A module imports the code of a command only when the command runs, so that `--help` is fast. A
user's mistake prints one line and exits with code 2.
"""
