"""Cancel a block of code when the client of an HTTP request disconnects."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from fakevllm_adapters.http.asgi import ClientDisconnected, Receive, wait_for_disconnect


class CancelOnDisconnect:
    """A context manager for an `async with` block. When the client disconnects, the context manager
    cancels the block and then raises ClientDisconnected.

    If the block is cancelled for another reason, the CancelledError is raised as usual. The block
    runs in the caller's task, as with `asyncio.timeout`. Only the wait for the disconnect runs in a
    task of its own.
    """

    def __init__(self, receive: Receive, linger_s: float = 0.0) -> None:
        """Create the context manager. `receive` is the `receive` function of the request's ASGI
        call. After a disconnect, the block may go on for `linger_s` seconds. A block that has not
        finished by then is cancelled."""
        self._receive = receive
        self._linger_s = linger_s
        self._is_cancelling = False
        self._has_exited = False
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._num_cancels_before = task.cancelling()
        self._watch = asyncio.create_task(wait_for_disconnect(self._receive))
        self._watch.add_done_callback(self._on_disconnect)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_exited = True  # a callback that is already scheduled cannot be removed any more
        self._watch.remove_done_callback(self._on_disconnect)
        self._watch.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._is_cancelling:
            is_only_cancel = self._task.uncancel() <= self._num_cancels_before
            if is_only_cancel and kind is asyncio.CancelledError:
                raise ClientDisconnected("the client disconnected") from error

    def _on_disconnect(self, watch: asyncio.Task[None]) -> None:
        if self._has_exited:
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._linger_s, self._cancel_block)

    def _cancel_block(self) -> None:
        self._is_cancelling = True
        self._task.cancel()
