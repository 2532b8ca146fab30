"""The command `fakevllm hooks reload`, which lets a running proxy load edited hooks."""

from __future__ import annotations

import typer

from fakevllm.cli.control import proxy_url
from fakevllm.cli.options import ConfigFile, ProxyKey, ProxyUrl
from fakevllm_runtime.commands import run_command

app = typer.Typer(
    name="hooks",
    help="Reload the hooks of a running proxy.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def about() -> None:
    """Reload the hooks of a running proxy."""


@app.command()
def reload(url: ProxyUrl = None, key: ProxyKey = None, config: ConfigFile = None) -> None:
    """Let the proxy try its edited hook files on the latest requests. The new hooks take over if
    the limits of [hooks.reload] allow it. Otherwise the old hooks stay in use, and the exit code is
    1."""

    def run() -> None:
        from fakevllm.runtime.admin_client import reload_hooks
        from fakevllm.runtime.terminal_text import printable

        reply = reload_hooks(proxy_url(url, config), key)
        for line in (reply["message"], *reply["changes"]):
            print(printable(str(line)))
        if reply["state"] not in ("taken_over", "unchanged"):
            raise typer.Exit(1)

    run_command(run)
