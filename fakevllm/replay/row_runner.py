"""Send the rows of a replay with bounded concurrency. While the proxy is being restarted, retry the
rows. Each row gets exactly one result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

from fakevllm.replay.retry_deadline import RETRY_FOR_S, RetryDeadline
from fakevllm.replay.row_senders import Player, RowFailed, RowInterrupted
from fakevllm.runtime.bounded_tasks import run_bounded
from fakevllm_adapters.protocol.swarm import Task


@dataclass(frozen=True, slots=True)
class RowResult:
    """The result of one dataset row that was replayed."""

    epoch: int
    task: Task
    answer: str | None
    """Text of the answer; None if the row failed or was interrupted."""
    failed: str | None
    """Reason why the row has no answer; None if the row was answered."""
    is_done: bool = True
    """Whether the row is answered or has failed for good. False means that the connection was
    broken until the retries ended, so the next replay sends the row again."""


def play(
    rows: Iterable[tuple[int, Task]],
    player: Player,
    key_of: Callable[[Task], str],
    concurrency: int,
    capacity: asyncio.Event | None = None,
    retry_for_s: float = RETRY_FOR_S,
) -> AsyncGenerator[RowResult]:
    """Send the rows, and yield their results in the order in which the rows end.

    At most `concurrency` rows run at a time. `rows` may be endless, because the next row is taken
    from `rows` only when fewer than `concurrency` rows run. While the event `capacity` is cleared,
    no row is sent. The caller clears this event while the trainer has enough groups to train.
    """
    attempts = (
        _play_one(epoch, task, player, key_of(task), capacity, RetryDeadline(retry_for_s))
        for epoch, task in rows
    )
    return run_bounded(attempts, concurrency)


async def _play_one(
    epoch: int,
    task: Task,
    player: Player,
    key: str,
    capacity: asyncio.Event | None,
    deadline: RetryDeadline,
) -> RowResult:
    while True:
        if capacity is not None:
            began_at = time.monotonic()
            await capacity.wait()
            deadline.exclude_wait(time.monotonic() - began_at)
        try:
            return RowResult(epoch, task, await player.play(task, key), None)
        except RowFailed as error:
            return RowResult(epoch, task, None, str(error))
        except RowInterrupted as error:
            pause_s = deadline.pause(time.monotonic())
            if pause_s is None:
                return RowResult(epoch, task, None, str(error), is_done=False)
        await asyncio.sleep(pause_s)
