"""The commands `fakevllm up` and `fakevllm down`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from fakevllm.cli.options import ConfigFile, RunDir
from fakevllm.errors import FakevllmError, UserError
from fakevllm_runtime.commands import run_command


def up(
    config: ConfigFile = None,
    run_dir: RunDir = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background; `fakevllm down` stops it.")
    ] = False,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Run server, proxy and console, as one fakevllm.toml says."""

    def run() -> None:
        from fakevllm.up.command import run_up
        from fakevllm.up.detached import start_detached
        from fakevllm.up.settings import read_settings
        from fakevllm_runtime.http_server import stop_when_stdin_closes

        if until_stdin_closes:
            stop_when_stdin_closes()
        settings = read_settings(config, run_dir)
        if detach:
            start_detached(settings)
        else:
            run_up(settings, ready_fd)

    _run(run)


def down(config: ConfigFile = None, run_dir: RunDir = None) -> None:
    """Stop what `fakevllm up --detach` has started."""

    def run() -> None:
        from fakevllm.config.model import load
        from fakevllm.up.down import stop_running

        folder = run_dir if run_dir is not None else load(config, {}).proxy.run_dir
        stop_running(folder)
        print(f"Stopped `fakevllm up` on {folder}.")

    _run(run)


def _run(run: Callable[[], None]) -> None:
    """Run a command. If programs failed although their settings are right, exit with code 1, so
    that a service manager starts the command again."""

    def translated() -> None:
        try:
            run()
        except UserError:
            raise
        except FakevllmError as error:
            print(f"fakevllm: {error}", file=sys.stderr)
            raise typer.Exit(1) from None

    run_command(translated)
