"""`fakevllm pause`, `resume` and `status`: what is said to a proxy that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fakevllm.cli.keys import ConfigFile
from fakevllm.runtime.exits import guarded

ProxyKey = Annotated[
    str | None, typer.Option(envvar="FAKEVLLM_KEY", help="Our API key at the proxy.")
]
ProxyUrl = Annotated[
    str | None, typer.Option(help="The proxy. Default: where the configuration has it.")
]


def named(url: str | None, config: Path | None) -> str:
    """The proxy's URL, by its flag or by the configuration that `serve` reads. Raises
    ConfigError."""
    if url is not None:
        return url
    from fakevllm.config.model import load

    return load(config, {}).local_url


def pause(url: ProxyUrl = None, key: ProxyKey = None, config: ConfigFile = None) -> None:
    """Stop fanning out, at once. A running proxy serves every request once until `resume`."""
    _say_to_proxy(url, key, config, paused=True)


def resume(url: ProxyUrl = None, key: ProxyKey = None, config: ConfigFile = None) -> None:
    """Fan out again."""
    _say_to_proxy(url, key, config, paused=False)


def _say_to_proxy(url: str | None, key: str | None, config: Path | None, *, paused: bool) -> None:
    def run() -> None:
        from fakevllm.runtime.admin_client import set_paused

        print(set_paused(named(url, config), key, paused=paused))

    guarded(run)


def status(
    url: ProxyUrl = None,
    key: ProxyKey = None,
    run_id: Annotated[
        str, typer.Option("--run", help="Whose learning: how its id begins. Default: the newest.")
    ] = "",
    config: ConfigFile = None,
) -> None:
    """Show what a running proxy does, and what was learnt. Fan-out, engine, groups, and why some
    were not trained."""

    def run() -> None:
        from rich.console import Console

        from fakevllm.runtime.admin_client import status as status_of

        Console().print(status_of(named(url, config), key, run_id))

    guarded(run)
