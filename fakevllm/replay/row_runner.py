"""Send the rows of a replay with bounded concurrency, and retry them while the proxy is being
restarted. Each row gets exactly one result."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from fakevllm.replay.retry_deadline import RetryDeadline
from fakevllm.replay.row_senders import Player, RowFailed, RowInterrupted
from fakevllm_adapters.protocol.swarm import Task

RETRY_FOR_S = 120.0
"""Seconds for which a row is retried while the connection is broken."""
MAX_PAUSE_S = 2.0
"""Longest pause between two attempts of a row, in seconds."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """The result of one row."""

    epoch: int
    task: Task
    answer: str | None
    """Text of the answer; None if the row failed or was interrupted."""
    failed: str | None
    """Reason why the row has no answer; None if the row was answered."""
    is_done: bool = True
    """Whether the row is answered or has failed for good. False means that the connection was
    broken until the retries ended, so the next replay sends the row again."""


async def play(
    rows: Iterable[tuple[int, Task]],
    player: Player,
    key_of: Callable[[Task], str],
    concurrency: int,
    capacity: asyncio.Event | None = None,
    retry_for_s: float = RETRY_FOR_S,
) -> AsyncIterator[RowResult]:
    """Send the rows, and yield their results in the order in which the rows end.

    At most `concurrency` rows run at a time. `rows` may be endless, because the next row is taken
    from `rows` only when fewer than `concurrency` rows run. While the event `capacity` is cleared,
    because the trainer has enough groups to train, no row is sent.
    """
    source = iter(rows)
    running: set[asyncio.Task[RowResult]] = set()
    try:
        while True:
            while len(running) < concurrency and (row := next(source, None)) is not None:
                attempt = _play_one(
                    *row, player, key_of(row[1]), capacity, RetryDeadline(retry_for_s)
                )
                running.add(asyncio.create_task(attempt))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _play_one(
    epoch: int,
    task: Task,
    player: Player,
    key: str,
    capacity: asyncio.Event | None,
    deadline: RetryDeadline,
) -> RowResult:
    pause_s = 0.2
    while True:
        if capacity is not None:
            began_at = time.monotonic()
            await capacity.wait()
            deadline.exclude_wait(time.monotonic() - began_at)
        try:
            return RowResult(epoch, task, await player.play(task.main_query, key), None)
        except RowFailed as error:
            return RowResult(epoch, task, None, str(error))
        except RowInterrupted as error:
            if not deadline.may_retry(time.monotonic()):
                return RowResult(epoch, task, None, str(error), is_done=False)
        await asyncio.sleep(random.uniform(0, pause_s))
        pause_s = min(MAX_PAUSE_S, 2 * pause_s)
