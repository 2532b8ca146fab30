"""Keeps a replay in step with training: a row waits while a full batch of groups waits.

An app's traffic comes when it comes, and what the trainer has no time for is dropped. A replayed
dataset can wait instead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import aiohttp

from fakevllm.runtime.admin_client import proxy_root
from fakevllm_adapters.protocol.keys import bearer_header
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply

MAX_BACKLOG = 1.0
"""In batches: while the next one is complete, training never waits for us."""
POLL_EVERY_S = 0.1
POLL_TIMEOUT_S = 5.0


def has_room(status: EngineStatusReply | None) -> bool:
    """An unknown backlog holds nobody back, nor does one that no engine works off."""
    if status is None or status.engine_status is EngineStatus.OFFLINE:
        return True
    return status.backlog < MAX_BACKLOG


@contextlib.asynccontextmanager
async def room_at(url: str, key: str | None = None) -> AsyncGenerator[asyncio.Event]:
    """Set while the proxy at `url` has room for another group; kept for as long as the block
    lasts."""
    room = asyncio.Event()
    room.set()
    following = asyncio.create_task(_follow(f"{proxy_root(url)}/fakevllm/engine", key, room))
    try:
        yield room
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(url: str, key: str | None, room: asyncio.Event) -> None:
    timeout = aiohttp.ClientTimeout(total=POLL_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=bearer_header(key)) as http:
        while True:
            if has_room(await _status(http, url)):
                room.set()
            else:
                room.clear()
            await asyncio.sleep(POLL_EVERY_S)


async def _status(http: aiohttp.ClientSession, url: str) -> EngineStatusReply | None:
    """A proxy that does not answer is no reason to wait: its rows find out themselves."""
    try:
        async with http.get(url) as answer:
            answer.raise_for_status()
            return EngineStatusReply.model_validate_json(await answer.read())
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
