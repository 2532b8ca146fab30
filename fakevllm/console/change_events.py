"""Server-sent events: notify open pages when the data that they show may have changed.

An event has no content. The times and sizes of the ledger's files show whether the ledger has
changed. Therefore an open page takes no lock and runs no query as long as nothing happens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

POLL_INTERVAL_S = 2.0
"""Seconds between two looks at the files, and so the minimum seconds between two events."""
CLOCK_INTERVALS = 5
"""Number of intervals between two events `clock`, after which the status of the proxy is loaded
again."""
MAX_STREAMS = 256
"""Maximum number of open event streams."""
LEDGER_EVENT = "event: ledger\ndata: changed\n\n"


class ChangeEvents:
    """The event streams of all open pages."""

    def __init__(
        self, state_of_files: Callable[[], object], interval_s: float = POLL_INTERVAL_S
    ) -> None:
        self._state_of_files = state_of_files
        self._interval_s = interval_s
        self._stopped = asyncio.Event()
        self._num_open = 0

    @property
    def is_full(self) -> bool:
        return self._num_open >= MAX_STREAMS

    def stop(self) -> None:
        """End all streams, so that the server can stop."""
        self._stopped.set()

    async def stream(self, is_logged_in: Callable[[], bool]) -> AsyncGenerator[str]:
        """Yield the events of one page until the login ends or the server stops: `ledger` after a
        change of the ledger, and `clock` from time to time. The first event is `ledger`, because
        the ledger may have changed since the page was made."""
        self._num_open += 1
        try:
            yield "retry: 5000\n\n"
            state = await asyncio.to_thread(self._state_of_files)
            yield LEDGER_EVENT
            num_intervals = 0
            while not await self._is_stopped() and is_logged_in():
                num_intervals += 1
                new_state = await asyncio.to_thread(self._state_of_files)
                if new_state != state:
                    state = new_state
                    yield LEDGER_EVENT
                if num_intervals % CLOCK_INTERVALS == 0:
                    yield "event: clock\ndata: changed\n\n"
        finally:
            self._num_open -= 1

    async def _is_stopped(self) -> bool:
        """Wait for one interval, or until the server stops. Return True if it stops."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), self._interval_s)
        return self._stopped.is_set()
