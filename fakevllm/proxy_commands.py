"""`fakevllm pause`, `resume` and `status`: what is said to a proxy that runs."""

from __future__ import annotations

from typing import Annotated

import typer

from fakevllm.exits import guarded

LOCAL = "http://127.0.0.1:8000"
ProxyKey = Annotated[
    str | None, typer.Option(envvar="FAKEVLLM_KEY", help="Our API key at the proxy.")
]
ProxyUrl = Annotated[str, typer.Option(help="The proxy, with or without /v1.")]


def pause(url: ProxyUrl = LOCAL, key: ProxyKey = None) -> None:
    """Stop fanning out, at once. A running proxy serves every request once until `resume`."""
    _say_to_proxy(url, key, paused=True)


def resume(url: ProxyUrl = LOCAL, key: ProxyKey = None) -> None:
    """Fan out again."""
    _say_to_proxy(url, key, paused=False)


def _say_to_proxy(url: str, key: str | None, *, paused: bool) -> None:
    def run() -> None:
        from fakevllm.running_proxy import set_paused

        print(set_paused(url, key, paused=paused))

    guarded(run)


def status(
    url: ProxyUrl = LOCAL,
    key: ProxyKey = None,
    run_id: Annotated[
        str, typer.Option("--run", help="Whose learning: how its id begins. Default: the newest.")
    ] = "",
) -> None:
    """Show what a running proxy does, and what was learnt. Fan-out, engine, groups, and why some
    were not trained."""

    def run() -> None:
        from rich.console import Console

        from fakevllm.running_proxy import status as status_of

        Console().print(status_of(url, key, run_id))

    guarded(run)
