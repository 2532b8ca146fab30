"""Run `fakevllm overwatch`: print one snapshot as text or JSON, or show the full screen."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass

from rich.console import Console

from fakevllm.config.upstream import checked_http_url
from fakevllm.errors import UserError
from fakevllm.overwatch.poller import ServerPoller
from fakevllm.overwatch.render import render_snapshot
from fakevllm.overwatch.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class OverwatchSettings:
    url: str
    key: str | None
    is_once: bool
    """Whether to print one snapshot instead of showing the full screen."""
    is_json: bool
    """Whether to print the snapshot as JSON. Requires `is_once`."""


def run_overwatch(settings: OverwatchSettings, console: Console) -> bool:
    """Show the state of a swarm server on the terminal. Return False only if `--once` is set and
    the poll of the server failed.

    Raises UserError for invalid settings. Without `--once`, UserError is also raised if the package
    textual is not installed or the standard streams are not a terminal.
    """
    if settings.is_json and not settings.is_once:
        raise UserError("--json works only together with --once.")
    try:
        checked_http_url(settings.url)
    except ValueError as error:
        raise UserError(f"--swarm-url {settings.url}: {error}; pass a key with --key.") from None
    if not settings.is_once:
        asyncio.run(_show_screen(settings))
        return True
    snapshot = asyncio.run(_poll_once(settings))
    if settings.is_json:
        print(json.dumps(snapshot.as_json(), indent=2))
    else:
        console.print(render_snapshot(snapshot, console.width))
    return not snapshot.is_away


async def _poll_once(settings: OverwatchSettings) -> Snapshot:
    async with ServerPoller(settings.url, settings.key) as poller:
        return await poller.poll()


async def _show_screen(settings: OverwatchSettings) -> None:
    """Show the full screen until the user quits. Raises UserError if the package textual is not
    installed. Raises UserError as well if stdin, stdout or stderr is not a terminal."""
    try:
        from fakevllm.overwatch.app import OverwatchApp
    except ModuleNotFoundError as error:
        raise UserError(
            f"The screen needs the package textual ({error}): in the folder of the clone, run "
            "pip install -c constraints.txt -e '.[overwatch]'. --once works without textual."
        ) from None
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise UserError(
            "The screen needs a terminal for stdin, stdout and stderr. --once works without a "
            "terminal."
        )
    async with ServerPoller(settings.url, settings.key) as poller:
        await OverwatchApp(poller).run_async()
