"""`job.lockstep`: groups one after another, each sampled by the version that all before it have
made, with seeds of its row. With an engine that decodes calls alone, two runs are the same.

What comes at its own time comes at its own bits: feedback, apps that ask several things at once,
hooks that draw lots, and a server or a proxy that goes on after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable

from fakevllm.settlement.delivery import Delivery
from fakevllm.swarm.link import SwarmLink
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply, Task

LOOK_EVERY_S = 0.02
"""At a step that is being made."""
SEED_BYTES = 6
"""Siblings count up from it, and every reader of JSON keeps such a number exactly."""


def seed_of(run_seed: int, row: str, nth: int) -> int:
    """Of the nth request of a row; its sibling i is sampled with i more.

    >>> seed_of(0, "sum-1-2", nth=0) == seed_of(0, "sum-1-2", nth=0) != seed_of(0, "sum-1-2", nth=1)
    True
    """
    named = f"{run_seed} {nth} {row}".encode(errors="replace")
    return int.from_bytes(hashlib.sha256(named).digest()[:SEED_BYTES], "big")


def stands_still(status: EngineStatusReply | None) -> bool:
    """Whether no step is made or due. A server that is away, or trains nothing, holds nobody
    back."""
    if status is None:
        return True
    if status.engine_status is EngineStatus.ROLLING:
        return status.backlog < 1
    return status.engine_status in (EngineStatus.OFFLINE, EngineStatus.BOOTING)


class Lockstep:
    def __init__(self, run_seed: int, settling: Delivery, link: SwarmLink) -> None:
        self._run_seed = run_seed
        self._settling = settling
        self._link = link
        self._one_group = asyncio.Lock()
        """Held by the group that is being sampled and scored; first come, first served."""
        self._num_asked: Counter[str] = Counter()
        """Requests by row, so as many as a dataset has."""

    @contextlib.asynccontextmanager
    async def turn(self, task: Task, *, is_group: bool) -> AsyncGenerator[int]:
        """Around a request, from when its turn has come; gives its seed. What is only served waits
        for no group: it may be what the hook of one asks."""
        async with self._one_group if is_group else contextlib.nullcontext():
            await self._until_published()
            row = f"{task.task_id or task.main_query}{'' if is_group else ' served'}"
            self._num_asked[row] += 1
            yield seed_of(self._run_seed, row, self._num_asked[row] - 1)

    async def _until_published(self) -> None:
        """Until the server has taken what was scored, and publishes no version. While it is away
        nothing is waited for: requests find out themselves."""

        def is_taken() -> bool:
            return self._settling.num_settling == 0 or not self._link.reached.is_set()

        await _until(is_taken)
        while not stands_still(await self._link.ask()):
            await asyncio.sleep(LOOK_EVERY_S)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(LOOK_EVERY_S)
