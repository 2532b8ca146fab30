"""How a command ends. A user's mistake is one line and exit code 2; Ctrl-C is no error."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer


def refused(error: Exception) -> typer.Exit:
    print(f"fakevllm-server: {error}", file=sys.stderr)
    return typer.Exit(2)


def guarded(run: Callable[[], None]) -> None:
    from fakevllm_server.config.model import ConfigError

    try:
        run()
    except ConfigError as error:
        raise refused(error) from None
    except KeyboardInterrupt:
        print("fakevllm-server: stopped", file=sys.stderr)
        raise typer.Exit(130) from None
