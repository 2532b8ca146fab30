"""A `kill -9` at a named point: the files are taken as they are there, and the next life gets them.

The process goes on, on its own files, and nobody hears of it any more.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from fakevllm_server.types import crash_points
from tests.swarm_server.journal.disks import LIMIT_S
from tests.swarm_server.journal.lives import Life

T = TypeVar("T")
TURNS = 20
"""Of the loop: enough for whoever answers without waiting for the disk."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    result: T
    next_life: Life | None
    """None where the point was never passed."""
    was_told: bool
    """Before the kill."""


class _Killer:
    def __init__(self, label: str, take_files: Callable[[], object]) -> None:
        self._label = label
        self._take_files = take_files
        self._loop = asyncio.get_running_loop()
        self._may_go = threading.Event()
        self.is_there = asyncio.Event()

    def pass_by(self, label: str) -> None:
        if label != self._label or self.is_there.is_set():
            return
        if threading.current_thread() is threading.main_thread():
            self.is_there.set()
            self._take_files()
            return
        self._loop.call_soon_threadsafe(self.is_there.set)
        self._may_go.wait(LIMIT_S)

    def let_go(self) -> None:
        self._may_go.set()


async def killed_at(
    life: Life, label: str, into: Path, act: Callable[[], Awaitable[T]]
) -> Outcome[T]:
    """`act` is asked of a life that is killed when it first passes there."""
    task = asyncio.ensure_future(act())

    async def all_written() -> None:
        await task
        await life.journal.flush()

    killer = _Killer(label, lambda: shutil.copytree(life.folder, into))
    crash_points.on_pass = killer.pass_by
    written, there = asyncio.create_task(all_written()), asyncio.create_task(killer.is_there.wait())
    try:
        await asyncio.wait({written, there}, return_when=asyncio.FIRST_COMPLETED)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        was_told = task.done()
        if killer.is_there.is_set() and not into.exists():
            shutil.copytree(life.folder, into)
    finally:
        killer.let_go()
        await written
        there.cancel()
        crash_points.on_pass = None
    if not into.exists():
        return Outcome(task.result(), None, was_told=True)
    life.close()
    return Outcome(task.result(), Life(into, life.job), was_told)
