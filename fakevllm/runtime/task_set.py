"""A set of asyncio background tasks, and the end of a single task.

The set keeps its tasks alive and logs their errors. When it is closed, it cancels its tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any


class TaskSet:
    """A set of asyncio tasks that run in the background and whose results nobody awaits.

    The event loop holds only weak references to tasks, so this set holds strong references. The set
    does not limit the number of tasks: the code that starts the tasks must limit it. Start no task
    after `close` was called.
    """

    def __init__(self, log: logging.Logger, failure_message: str) -> None:
        """Create an empty set. If a task raises, `failure_message` is logged with the traceback."""
        self._log = log
        self._failure_message = failure_message
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Return the number of tasks that are not done."""
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._on_done)
        return task

    async def close(self, grace_s: float = 0.0) -> None:
        """Wait up to `grace_s` seconds until the tasks are done. Then cancel the tasks that are
        still running."""
        if self._running and grace_s > 0:
            await asyncio.wait(self._running, timeout=grace_s)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.error(self._failure_message, exc_info=task.exception())


async def cancel_task(task: asyncio.Task[None]) -> None:
    """Cancel a task, and return when it has ended. Raises the error with which it had ended."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
