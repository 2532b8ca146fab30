"""Work that nobody waits for any more: a block that ends when its app has left."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from fakevllm_adapters.http.asgi import ClientLeft, Receive, until_disconnect


class WhileThere:
    """Cancels its block once the app has left, and raises ClientLeft then; a cancellation from
    elsewhere goes through as it is. The way of `asyncio.timeout`, and one task cheaper than waiting
    for two."""

    def __init__(self, receive: Receive, linger_s: float = 0.0) -> None:
        """`linger_s`: how long the block may still come to its end by itself."""
        self._receive = receive
        self._linger_s = linger_s
        self._is_ending = False
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._num_asked_before = task.cancelling()
        self._watch = asyncio.create_task(until_disconnect(self._receive))
        self._watch.add_done_callback(self._on_left)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._is_over = True  # a callback that is scheduled already can no longer be removed
        self._watch.remove_done_callback(self._on_left)
        self._watch.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._is_ending:
            is_all = self._task.uncancel() <= self._num_asked_before
            if is_all and kind is asyncio.CancelledError:
                raise ClientLeft("the app has left") from error

    def _on_left(self, watch: asyncio.Task[None]) -> None:
        if self._is_over:
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._linger_s, self._end)

    def _end(self) -> None:
        self._is_ending = True
        self._task.cancel()
