"""The command line of `fakevllm overwatch`."""

from __future__ import annotations

from typing import Annotated

import typer

from fakevllm.cli.options import ConfigFile
from fakevllm_runtime.commands import run_command

SwarmUrl = Annotated[
    str | None, typer.Option("--swarm-url", "--swarm", help="URL of the swarm server.")
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        "--swarm-key",
        envvar="FAKEVLLM_SWARM_KEY",
        help="API key for the swarm server.",
    ),
]


def overwatch(
    swarm_url: SwarmUrl = None,
    key: Key = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
    config: ConfigFile = None,
) -> None:
    """Show the state of a swarm server on one screen. Press keys to start, stop, pause, resume or
    drain the server."""

    def run() -> None:
        from rich.console import Console

        from fakevllm.config.model import load
        from fakevllm.overwatch.command import OverwatchSettings, run_overwatch

        server = load(config, {"swarm": {"url": swarm_url, "key": key}}).swarm
        settings = OverwatchSettings(server.url, server.key, once, as_json)
        if not run_overwatch(settings, Console()):
            raise typer.Exit(1)

    run_command(run)
