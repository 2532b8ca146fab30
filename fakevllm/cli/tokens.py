"""`fakevllm tokens`: its command line. Nothing heavy is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fakevllm.cli.keys import ConfigFile
from fakevllm.runtime.exits import run_command

SwarmKey = Annotated[str | None, typer.Option(envvar="FAKEVLLM_SWARM_KEY", help="Our key there.")]


def tokens(
    episode: Annotated[
        str | None,
        typer.Argument(
            help="A group, GROUP/INDEX, or an active episode. Default: the last trained."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page here instead.")] = None,
    by: Annotated[
        Literal["advantage", "logprob"], typer.Option(help="What the colours tell.")
    ] = "advantage",
    model: Annotated[
        Path | None, typer.Option(help="Folder with tokenizer.json. Default: the engine is asked.")
    ] = None,
    ledger: Annotated[Path | None, typer.Option(help="Default: the one in --run-dir.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The proxy's.")] = None,
    swarm: Annotated[str | None, typer.Option(help="URL of the swarm server.")] = None,
    swarm_key: SwarmKey = None,
    config: ConfigFile = None,
) -> None:
    """Show what was trained, token by token. Id, text, mask, logprob and advantage, coloured."""

    def run() -> None:
        from rich.console import Console

        from fakevllm.config.model import load
        from fakevllm.tokens.colours import By
        from fakevllm.tokens.command import TokensSettings, run_tokens

        flags = {"proxy": {"run_dir": run_dir}, "swarm": {"url": swarm, "key": swarm_key}}
        settings = load(config, flags)
        file = settings.ledger_file if ledger is None else ledger
        server = settings.swarm
        asked = TokensSettings(episode, file, server.url, server.key, model, html, By(by))
        run_tokens(asked, Console())

    run_command(run)
