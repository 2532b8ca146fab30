"""Simulate `kill -9` at a crash point: copy the files there, and start a process on the copy.

The old process finishes on its own files and is then closed.
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
from tests.swarm_server.journal.disk_faults import LIMIT_S
from tests.swarm_server.journal.server_process import ServerProcess

T = TypeVar("T")
NUM_YIELDS = 20
"""Number of iterations of the event loop. After these iterations, every request has ended that does
not wait for the disk."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """The result of an action during which the process may have been killed."""

    result: T
    next_process: ServerProcess | None
    """None if the process was not killed, because it did not reach the crash point."""
    is_acknowledged: bool
    """Whether the action ended before the kill."""


class _Killer:
    """Stops the writer's thread at a crash point until the files are copied."""

    def __init__(self, label: str, copy_files: Callable[[], object]) -> None:
        self._label = label
        self._copy_files = copy_files
        self._loop = asyncio.get_running_loop()
        self._released = threading.Event()
        self.is_reached = asyncio.Event()

    def on_crash_point(self, label: str) -> None:
        if label != self._label or self.is_reached.is_set():
            return
        if threading.current_thread() is threading.main_thread():
            self.is_reached.set()
            self._copy_files()
            return
        self._loop.call_soon_threadsafe(self.is_reached.set)
        self._released.wait(LIMIT_S)

    def release(self) -> None:
        self._released.set()


async def kill_at(
    process: ServerProcess, label: str, into: Path, action: Callable[[], Awaitable[T]]
) -> Outcome[T]:
    """Run an action, and kill the process when it first reaches the crash point `label`.

    The next process starts on a copy of the files in the folder `into`.
    """
    task = asyncio.ensure_future(action())

    async def all_written() -> None:
        await task
        await process.journal.flush()

    killer = _Killer(label, lambda: shutil.copytree(process.folder, into))
    crash_points.on_pass = killer.on_crash_point
    written = asyncio.create_task(all_written())
    reached = asyncio.create_task(killer.is_reached.wait())
    try:
        await asyncio.wait({written, reached}, return_when=asyncio.FIRST_COMPLETED)
        for _ in range(NUM_YIELDS):
            await asyncio.sleep(0)
        is_acknowledged = task.done()
        if killer.is_reached.is_set() and not into.exists():
            shutil.copytree(process.folder, into)
    finally:
        killer.release()
        await written
        reached.cancel()
        crash_points.on_pass = None
    if not into.exists():
        return Outcome(task.result(), None, is_acknowledged=True)
    process.close()
    return Outcome(task.result(), ServerProcess(into, process.job), is_acknowledged)
