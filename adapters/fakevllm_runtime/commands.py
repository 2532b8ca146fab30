"""Exit codes of commands: 2 and one line for a user's mistake, 130 for Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from fakevllm_runtime.errors import UserError


def run_command(run: Callable[[], None], program: str = "fakevllm") -> None:
    """Call `run`, and turn a UserError or Ctrl-C into a line on stderr and `typer.Exit`.

    `program` is the name at the beginning of the line.
    """
    try:
        run()
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print(f"{program}: stopped", file=sys.stderr)
        raise typer.Exit(130) from None
