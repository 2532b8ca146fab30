"""The setting `job.lockstep`: process groups (requests with their sampled answers) one after
another, so that a run can be reproduced.

Before a group is sampled, the server must have finished all training steps for which it has enough
groups.

The random seeds of the sampled answers are derived from the run's seed and the dataset row. For two
runs to be identical, the engine must also decode the calls one at a time, without batching.

Even then, two runs can differ for these reasons:

* Users give feedback.
* Apps send requests concurrently.
* Hooks use random numbers.
* The server or the proxy resumes after a crash.
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
"""Seconds between two polls of a condition, such as the end of the server's training step."""
SEED_BYTES = 6
"""Size of a random seed in bytes. The sum of such a seed and a sibling's index is less than 2^53.
Therefore JSON parsers that store numbers as doubles read the sum exactly."""


def seed_of(run_seed: int, row: str, nth: int) -> int:
    """Return the random seed for one request. `row` identifies the request's dataset row, and `nth`
    is the number of earlier requests for this row. Sibling i (the i-th answer that is sampled for
    the request) is sampled with the returned seed + i.

    >>> seed_of(0, "sum-1-2", nth=0) == seed_of(0, "sum-1-2", nth=0) != seed_of(0, "sum-1-2", nth=1)
    True
    """
    text = f"{run_seed} {nth} {row}".encode(errors="replace")
    return int.from_bytes(hashlib.sha256(text).digest()[:SEED_BYTES], "big")


def is_idle(status: EngineStatusReply | None) -> bool:
    """Return True if the server runs no training step and has too few groups (requests with their
    sampled answers) to begin a step.

    Also return True if the server is unreachable, or if its engine is off or booting.
    """
    if status is None:
        return True
    if status.engine_status is EngineStatus.ROLLING:
        return status.backlog < 1
    return status.engine_status in (EngineStatus.OFFLINE, EngineStatus.BOOTING)


class Lockstep:
    """A lock that makes groups (requests with their sampled answers) run one after another. The
    object also computes a random seed for each request."""

    def __init__(self, run_seed: int, delivery: Delivery, link: SwarmLink) -> None:
        self._run_seed = run_seed
        self._delivery = delivery
        self._link = link
        self._group_lock = asyncio.Lock()
        """Lock that is held while a group is sampled and scored. Waiting groups get the lock in the
        order in which their requests arrived."""
        self._num_requests: Counter[str] = Counter()
        """Number of requests so far for each dataset row. Its size is bounded by the size of the
        dataset."""

    @contextlib.asynccontextmanager
    async def slot(self, task: Task, *, is_group: bool) -> AsyncGenerator[int]:
        """Wait until the server is idle, then yield the random seed for a request. Process the
        request in the `async with` block.

        If `is_group` is True, the request is sampled several times and trained. A lock is then held
        until the block ends, so only one such request runs at a time. If `is_group` is False, the
        request does not wait for the lock. The reward hook of the running group may have sent the
        request. In this case, waiting for the lock would be a deadlock.
        """
        async with self._group_lock if is_group else contextlib.nullcontext():
            await self._wait_until_idle()
            row = f"{task.task_id or task.main_query}{'' if is_group else ' served'}"
            self._num_requests[row] += 1
            yield seed_of(self._run_seed, row, self._num_requests[row] - 1)

    async def _wait_until_idle(self) -> None:
        """Wait until the server has accepted all scored groups. Then wait until the server has
        finished every training step for which it has enough groups.

        If the server is unreachable, the wait ends early.
        """

        def is_accepted() -> bool:
            return self._delivery.num_unsettled == 0 or not self._link.reached.is_set()

        await _wait_until(is_accepted)
        while not is_idle(await self._link.fetch_status()):
            await asyncio.sleep(POLL_EVERY_S)


async def _wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(POLL_EVERY_S)
