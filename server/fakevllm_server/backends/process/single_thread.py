"""A trainer's own thread: one action after another, while the event loop goes on answering."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class OneThread:
    """A daemon thread, so that a process may end in the middle of an action."""

    def __init__(self, name: str, before_all: Callable[[], object]) -> None:
        """`before_all` runs on the thread first: some settings of torch are a thread's own."""
        self._before_all = before_all
        # Unbounded, but asked by one server, which waits for each answer.
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._main, name=name, daemon=True).start()

    async def run(self, action: Callable[[], Result]) -> Result:
        """Raises what the action raises."""
        future: Future[Result] = Future()
        self._inbox.put((action, future))
        return await asyncio.wrap_future(future)

    def _main(self) -> None:
        self._before_all()
        while True:
            action, future = self._inbox.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(action())
            # Whoever asked is told; the thread goes on to the next action.
            except Exception as error:
                future.set_exception(error)
