"""The command line of `fakevllm tokens`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fakevllm.cli.options import ConfigFile, RunDir, SwarmKey
from fakevllm_runtime.commands import run_command


def tokens(
    episode: Annotated[
        str | None,
        typer.Argument(
            help="Id of a group, GROUP/INDEX for one sibling, or id of an active client's "
            "episode. Default: the last trained group."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a web page to this file instead.")
    ] = None,
    by: Annotated[
        Literal["advantage", "logprob"], typer.Option(help="Value that the colours show.")
    ] = "advantage",
    model: Annotated[
        Path | None, typer.Option(help="Folder with tokenizer.json. Default: use the engine's.")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Ledger file. Default: the one in --run-dir.")
    ] = None,
    run_dir: RunDir = None,
    swarm: Annotated[str | None, typer.Option(help="URL of the swarm server.")] = None,
    swarm_key: SwarmKey = None,
    config: ConfigFile = None,
) -> None:
    """Show the trained tokens of an episode. For each token, the output has its id, text, loss
    mask, logprob and advantage."""

    def run() -> None:
        from rich.console import Console

        from fakevllm.config.model import load
        from fakevllm.tokens.colours import ColourBy
        from fakevllm.tokens.command import TokensSettings, run_tokens

        flags = {"proxy": {"run_dir": run_dir}, "swarm": {"url": swarm, "key": swarm_key}}
        settings = load(config, flags)
        file = settings.ledger_file if ledger is None else ledger
        server = settings.swarm
        tokens_settings = TokensSettings(
            episode, file, server.url, server.key, model, html, ColourBy(by)
        )
        run_tokens(tokens_settings, Console())

    run_command(run)
