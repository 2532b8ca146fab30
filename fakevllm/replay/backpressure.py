"""Backpressure for a replay: rows wait while enough batches of groups wait for the trainer. Usually
one full batch is enough. A job with `async_steps` collects more batches.

A group is a request with all its sampled answers. Without backpressure, a replay would send
requests faster than the trainer can use their groups. The groups would become stale and would be
dropped. The traffic of an app cannot be delayed for this reason, but the rows of a dataset can.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import aiohttp

from fakevllm.runtime.admin_client import proxy_root
from fakevllm_adapters.protocol.keys import bearer_header
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply

POLL_EVERY_S = 0.1
POLL_TIMEOUT_S = 5.0


def has_capacity(status: EngineStatusReply | None) -> bool:
    """Return True if the replay may send another dataset row to the proxy: if fewer batches of
    groups wait for the trainer than the job collects (`max_backlog`).

    Also return True if the engine is off or its status is unknown. In these cases, the backlog
    might never shrink, so a row that waits for the trainer might wait forever.
    """
    if status is None or status.engine_status is EngineStatus.OFFLINE:
        return True
    return status.backlog < status.max_backlog


@contextlib.asynccontextmanager
async def follow_capacity(url: str, key: str | None = None) -> AsyncGenerator[asyncio.Event]:
    """Yield an asyncio event that says when rows may be sent. The event is set while another row
    may be sent. The event is cleared while enough batches of groups wait for the trainer.

    Until the `async with` block ends, a background task polls the proxy at `url` and updates the
    event.
    """
    capacity = asyncio.Event()
    capacity.set()
    poller = asyncio.create_task(_follow(f"{proxy_root(url)}/fakevllm/engine", key, capacity))
    try:
        yield capacity
    finally:
        poller.cancel()
        await asyncio.gather(poller, return_exceptions=True)


async def _follow(url: str, key: str | None, capacity: asyncio.Event) -> None:
    timeout = aiohttp.ClientTimeout(total=POLL_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=bearer_header(key)) as http:
        while True:
            if has_capacity(await _status(http, url)):
                capacity.set()
            else:
                capacity.clear()
            await asyncio.sleep(POLL_EVERY_S)


async def _status(http: aiohttp.ClientSession, url: str) -> EngineStatusReply | None:
    """Return the engine's status, or None if the proxy does not answer.

    While the proxy does not answer, the trainer's backlog does not delay rows. Each row is then
    sent, fails to connect, and is retried.
    """
    try:
        async with http.get(url) as answer:
            answer.raise_for_status()
            return EngineStatusReply.model_validate_json(await answer.read())
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
