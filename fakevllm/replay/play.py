"""Many rows at once: bounded concurrency, patience with a proxy that restarts, one end per row."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from fakevllm.replay.patience import Patience
from fakevllm.replay.players import Player, RowFailed, RowInterrupted
from fakevllm_adapters.protocol.swarm import Task

PATIENCE_S = 120.0
"""How long one row is played again while the way to the model is cut."""
MAX_PAUSE_S = 2.0
"""Between two tries of a row."""


@dataclass(frozen=True, slots=True)
class Played:
    """One row's end."""

    epoch: int
    task: Task
    answer: str | None
    failed: str | None
    is_done: bool = True
    """False where the way was cut for too long: the row is to be played another time."""


async def play(
    rows: Iterable[tuple[int, Task]],
    player: Player,
    key_of: Callable[[Task], str],
    concurrency: int,
    room: asyncio.Event | None = None,
    patience_s: float = PATIENCE_S,
) -> AsyncIterator[Played]:
    """Ends of rows as they come. `rows` may be endless: no more than `concurrency` are taken
    ahead. A row begins when there is `room`."""
    source = iter(rows)
    running: set[asyncio.Task[Played]] = set()
    try:
        while True:
            while len(running) < concurrency and (row := next(source, None)) is not None:
                turn = _play_one(*row, player, key_of(row[1]), room, Patience(patience_s))
                running.add(asyncio.create_task(turn))
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
    room: asyncio.Event | None,
    patience: Patience,
) -> Played:
    pause_s = 0.2
    while True:
        if room is not None:
            begun = time.monotonic()
            await room.wait()
            patience.leave_out(time.monotonic() - begun)
        try:
            return Played(epoch, task, await player.play(task.main_query, key), None)
        except RowFailed as error:
            return Played(epoch, task, None, str(error))
        except RowInterrupted as error:
            if not patience.outlasts_cut(time.monotonic()):
                return Played(epoch, task, None, str(error), is_done=False)
        await asyncio.sleep(random.uniform(0, pause_s))
        pause_s = min(MAX_PAUSE_S, 2 * pause_s)
