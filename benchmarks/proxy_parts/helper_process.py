"""The command line and the end of a process between a load and a server."""

from __future__ import annotations

import argparse
import os
import sys
import threading


def parse_arguments(description: str) -> argparse.Namespace:
    """Return the arguments `upstream` and `port`. With `--until-stdin-closes`, the process exits
    when its parent process closes standard input."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--upstream", required=True, help="URL of the server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--until-stdin-closes", action="store_true", help="exit when standard input closes"
    )
    args = parser.parse_args()
    if args.until_stdin_closes:
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    return args


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)
