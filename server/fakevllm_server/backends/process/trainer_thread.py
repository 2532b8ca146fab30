"""A trainer's thread. The thread runs one action after another, while the event loop answers
requests."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class SingleThread:
    """A daemon thread that runs actions one after another. A daemon thread does not prevent the
    process from exiting during an action."""

    def __init__(self, name: str, initialize: Callable[[], object]) -> None:
        """Start the thread. `initialize` runs first in the new thread, because some settings of
        torch apply only to the thread that sets them."""
        self._initialize = initialize
        # Unbounded, but it stays short: the only caller is the swarm server, which waits for each
        # action to end.
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._main, name=name, daemon=True).start()

    async def run(self, action: Callable[[], Result]) -> Result:
        """Run `action` on this daemon thread, after all earlier actions. Return its result. An
        exception of the action is raised in the caller."""
        future: Future[Result] = Future()
        self._inbox.put((action, future))
        return await asyncio.wrap_future(future)

    def _main(self) -> None:
        self._initialize()
        while True:
            action, future = self._inbox.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(action())
            # Isolated: the caller gets the exception, and the thread runs the next action.
            except Exception as error:
                future.set_exception(error)
