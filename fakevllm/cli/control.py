"""The commands `fakevllm pause`, `fakevllm resume` and `fakevllm status`, which control or show a
running proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fakevllm.cli.options import ConfigFile, ProxyKey, ProxyUrl
from fakevllm_runtime.commands import run_command


def proxy_url(url: str | None, config: Path | None) -> str:
    """Return `url`. If `url` is None, return the proxy's address from the configuration. Raises
    ConfigError if the configuration is not valid or has no fixed port."""
    if url is not None:
        return url
    from fakevllm.config.model import load

    return load(config, {}).local_url


def pause(url: ProxyUrl = None, key: ProxyKey = None, config: ConfigFile = None) -> None:
    """Stop training on new requests. Until `fakevllm resume`, the proxy samples each request only
    once."""
    _set_paused(url, key, config, paused=True)


def resume(url: ProxyUrl = None, key: ProxyKey = None, config: ConfigFile = None) -> None:
    """Resume training on new requests. The proxy samples each request several times."""
    _set_paused(url, key, config, paused=False)


def _set_paused(url: str | None, key: str | None, config: Path | None, *, paused: bool) -> None:
    def run() -> None:
        from fakevllm.runtime.admin_client import set_paused

        print(set_paused(proxy_url(url, config), key, paused=paused))

    run_command(run)


def status(
    url: ProxyUrl = None,
    key: ProxyKey = None,
    run_id: Annotated[
        str,
        typer.Option(
            "--run", help="Training run to show, by the beginning of its id. Default: the newest."
        ),
    ] = "",
    config: ConfigFile = None,
) -> None:
    """Show the state of a running proxy. The table shows whether training is paused, the state of
    the engine, and the learning curve. It also shows how many requests were not trained, for each
    reason."""

    def run() -> None:
        from rich.console import Console

        from fakevllm.cli.status_table import status_table

        Console().print(status_table(proxy_url(url, config), key, run_id))

    run_command(run)
