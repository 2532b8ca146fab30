"""How a command ends. A user's mistake is one line and exit code 2; Ctrl-C is no error."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from fakevllm.errors import UserError


def guarded(run: Callable[[], None]) -> None:
    try:
        run()
    except UserError as error:
        print(f"fakevllm: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("fakevllm: stopped", file=sys.stderr)
        raise typer.Exit(130) from None
