"""Tasks that nobody awaits: kept until they are done, and ended by who began them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any


class Background:
    """close() last. Bounded by what begins the tasks."""

    def __init__(self, log: logging.Logger, trouble: str) -> None:
        """`trouble`: what is logged of a task that raised."""
        self._log = log
        self._trouble = trouble
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Tasks that are not done."""
        return len(self._running)

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self, grace_s: float = 0.0) -> None:
        """Cancels what is not done within the grace."""
        if self._running and grace_s > 0:
            await asyncio.wait(self._running, timeout=grace_s)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.error(self._trouble, exc_info=task.exception())
