"""The command line `fakevllm`. The module `main` defines most commands; the other modules define
the remaining commands.

The code of a command is imported only when the command runs, so that `--help` is fast. If the user
has made a mistake, such as a wrong flag, the command prints one line and exits with code 2.
"""
