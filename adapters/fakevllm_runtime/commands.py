"""The exit codes of commands.

After a mistake of the user, a command prints one line to stderr and exits with 2. After Ctrl-C, it
exits with 130.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import typer

from fakevllm_runtime.errors import UserError
from fakevllm_runtime.path_access import is_refused_access, unusable_message


def run_command(run: Callable[[], None], program: str = "fakevllm") -> None:
    """Call the function `run`. If it raises UserError, exit with code 2. After Ctrl-C, exit with
    code 130.

    Before the exit, one line is printed to stderr: the name `program`, and the message of the
    UserError or "stopped". A file or folder that this process may not use is a mistake of the user
    too.
    """
    try:
        run()
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except OSError as error:  # translates
        if not is_refused_access(error):
            raise
        message = unusable_message(Path(error.filename), error, "choose another path")
        print(f"{program}: {message}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print(f"{program}: stopped", file=sys.stderr)
        raise typer.Exit(130) from None
