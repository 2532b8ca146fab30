"""Exit codes of commands: 2, with one line on stderr, for a user's mistake, and 130 for Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from fakevllm_runtime.errors import UserError


def run_command(run: Callable[[], None], program: str = "fakevllm") -> None:
    """Call `run`, and end the program with an exit code after a UserError or Ctrl-C.

    A UserError's message is printed to stderr. `program` is the name at the beginning of the line.
    """
    try:
        run()
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print(f"{program}: stopped", file=sys.stderr)
        raise typer.Exit(130) from None
