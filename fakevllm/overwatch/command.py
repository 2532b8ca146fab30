"""Once, as a picture or as JSON; or on a whole terminal until it is left."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass

from rich.console import Console

from fakevllm.config.upstream import checked_http_url
from fakevllm.errors import UserError
from fakevllm.overwatch.poll import Poll
from fakevllm.overwatch.render import drawn
from fakevllm.overwatch.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class OverwatchSettings:
    url: str
    key: str | None
    is_once: bool
    is_json: bool


def run_overwatch(settings: OverwatchSettings, console: Console) -> bool:
    """Whether the server answered, the last time it was fetch. Raises UserError."""
    if settings.is_json and not settings.is_once:
        raise UserError("--json goes with --once: the screen is not for programs.")
    try:
        checked_http_url(settings.url)
    except ValueError as error:
        raise UserError(f"--swarm-url {settings.url}: {error}; a key goes into --key.") from None
    if not settings.is_once:
        return asyncio.run(_watched(settings))
    shot = asyncio.run(_once(settings))
    if settings.is_json:
        print(json.dumps(shot.as_json(), indent=2))
    else:
        console.print(drawn(shot, console.width))
    return not shot.is_away


async def _once(settings: OverwatchSettings) -> Snapshot:
    async with Poll(settings.url, settings.key) as poll:
        return await poll.look()


async def _watched(settings: OverwatchSettings) -> bool:
    try:
        from fakevllm.overwatch.app import Overwatch
    except ModuleNotFoundError as error:
        raise UserError(
            f"The screen needs textual ({error}): "
            "in the clone's folder, pip install -c constraints.txt -e '.[overwatch]'; "
            "--once needs nothing more."
        ) from None
    if not all(one.isatty() for one in (sys.stdin, sys.stdout, sys.stderr)):
        raise UserError(
            "The screen needs a terminal to read from and to write to; --once needs none."
        )
    async with Poll(settings.url, settings.key) as poll:
        await Overwatch(poll).run_async()
    return True
