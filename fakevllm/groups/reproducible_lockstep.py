"""`job.lockstep`: runs become reproducible, because groups are processed one after another.

Before a group is sampled, the server must have finished every training step that the earlier groups
made due. The seeds of the group's siblings are derived from its dataset row. If the engine
also decodes each call alone, two runs are identical.

Two runs can still differ because of feedback, apps that send requests concurrently, hooks that use
randomness, and a server or proxy that resumes after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable

from fakevllm.settlement.reward_delivery import Delivery
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply, Task

POLL_EVERY_S = 0.02
"""Seconds between two requests for the server's status during a training step."""
SEED_BYTES = 6
"""Size of a seed. The index of a sibling is added to the seed. 48 bits stay exact in JSON readers
that store numbers as doubles."""


def seed_of(run_seed: int, row: str, nth: int) -> int:
    """Return the random seed of the nth request of a dataset row. Sibling i of the request is
    sampled with this seed + i.

    >>> seed_of(0, "sum-1-2", nth=0) == seed_of(0, "sum-1-2", nth=0) != seed_of(0, "sum-1-2", nth=1)
    True
    """
    text = f"{run_seed} {nth} {row}".encode(errors="replace")
    return int.from_bytes(hashlib.sha256(text).digest()[:SEED_BYTES], "big")


def is_idle(status: EngineStatusReply | None) -> bool:
    """Return True if the server runs no training step and has too few groups to begin one.

    The result is also True for a server that is unreachable, off or booting.
    """
    if status is None:
        return True
    if status.engine_status is EngineStatus.ROLLING:
        return status.backlog < 1
    return status.engine_status in (EngineStatus.OFFLINE, EngineStatus.BOOTING)


class Lockstep:
    """The lock and the seeds that make groups run one after another."""

    def __init__(self, run_seed: int, delivery: Delivery, link: SwarmLink) -> None:
        self._run_seed = run_seed
        self._delivery = delivery
        self._link = link
        self._group_lock = asyncio.Lock()
        """Lock of the group that is being sampled and scored. Waiting groups get the lock in the
        order of their requests."""
        self._num_requests: Counter[str] = Counter()
        """Number of requests for each dataset row; bounded by the size of the dataset."""

    @contextlib.asynccontextmanager
    async def slot(self, task: Task, *, is_group: bool) -> AsyncGenerator[int]:
        """Wait until the server is idle, then yield the seed of a request. The block processes the
        request. If `is_group` is True, a lock is held meanwhile, so only one group runs at a time.

        A request that is sampled once and not trained does not wait for the lock. The reward hook
        of the running group may have sent the request, and waiting would then be a deadlock.
        """
        async with self._group_lock if is_group else contextlib.nullcontext():
            await self._wait_until_idle()
            row = f"{task.task_id or task.main_query}{'' if is_group else ' served'}"
            self._num_requests[row] += 1
            yield seed_of(self._run_seed, row, self._num_requests[row] - 1)

    async def _wait_until_idle(self) -> None:
        """Wait until the server has accepted all scored groups, and has finished the training step
        that these groups made due.

        The wait ends early if the server is unreachable. The next request then fails, or is held
        until the server is back.
        """

        def is_accepted() -> bool:
            return self._delivery.num_unsettled == 0 or not self._link.reached.is_set()

        await _wait_until(is_accepted)
        while not is_idle(await self._link.fetch_status()):
            await asyncio.sleep(POLL_EVERY_S)


async def _wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(POLL_EVERY_S)
