"""The exit codes of commands.

A command exits with 2 and one line on stderr after a user's mistake, and with 130 after Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from fakevllm_runtime.errors import UserError


def run_command(run: Callable[[], None], program: str = "fakevllm") -> None:
    """Call the function `run`. End the program with an exit code after a UserError or Ctrl-C.

    Before the end, one line is printed to stderr. It consists of the name `program` and either the
    message of the UserError or "stopped".
    """
    try:
        run()
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print(f"{program}: stopped", file=sys.stderr)
        raise typer.Exit(130) from None
