"""The one thread that writes the journal, in group commits.

While a transaction is being flushed to disk, further changes arrive. They are written together in
the next transaction. Therefore many concurrent requests need only slightly more flushes than a few
requests.

If the disk refuses a transaction, the writer retries until the transaction succeeds. Meanwhile the
changes are queued in memory, are not in the journal's file, and are not acknowledged to clients.
Any other error means a bug in the server or a damaged file, and the writer stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

log = logging.getLogger("fakevllm.server")

MAX_BATCH = 1_000
"""Maximum number of changes in one transaction."""
MAX_WAITING = 10_000
"""Number of queued changes above which the server accepts no new request."""
RETRY_S = 0.5
"""Seconds before a transaction that the disk refused is tried again."""
_DISK_ERRORS = (OperationalError, sqlite3.OperationalError)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the journal: a function that changes rows, with a label. Each change is applied
    within one transaction."""

    label: str
    """Kind of the change. Tests use it to end the process at a certain change."""
    apply: Callable[[Connection], object]


class JournalError(Exception):
    """Error for a change of the journal that was not written, or was not written in time."""


@dataclass(frozen=True, slots=True)
class _Waiter:
    position: int
    written: asyncio.Future[None]


class JournalWriter:
    """The queue of changes for the journal, and the thread that writes them."""

    def __init__(
        self,
        transact: Callable[[Sequence[Change]], None],
        on_broken: Callable[[], object] = lambda: None,
    ) -> None:
        """Create the queue and start the thread. `transact` is a function that writes changes in
        one transaction.

        `on_broken` is called on the writer's thread when the thread stops because of a bug or a
        damaged file.
        """
        self._transact = transact
        self._on_broken = on_broken
        self._wake = threading.Condition()
        self._queue: deque[Change] = deque()
        self._num_put = 0
        self._num_written = 0
        self._is_closing = False
        self._waiters: list[_Waiter] = []
        self.error: str | None = None
        """Reason why no change can be written at present; None if writing works."""
        self._is_over = False
        """Whether the writer has stopped, so that no more changes will be written."""
        self.is_broken = False
        """Whether the writer has stopped because of a bug or a damaged file."""
        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether more than MAX_WAITING changes wait to be written to the journal."""
        return self._num_put - self._num_written > MAX_WAITING

    @property
    def last_position(self) -> int:
        """Number of the change of the journal that was queued last. The first change has the
        number 1."""
        return self._num_put

    @property
    def written_position(self) -> int:
        """Number of the newest change of the journal that is on disk. All changes that were
        queued before this change are on disk too."""
        return self._num_written

    @property
    def is_flushed(self) -> bool:
        return self._num_written == self._num_put

    def put(self, *changes: Change) -> int:
        """Queue changes that the thread then writes to the journal. Return the number of the last
        of these changes, for use with `wait_written`."""
        with self._wake:
            self._queue.extend(changes)
            self._num_put += len(changes)
            self._wake.notify()
            return self._num_put

    async def wait_written(self, position: int, limit_s: float | None = None) -> None:
        """Wait until the change with the number `position` is on disk. All earlier changes are then
        on disk too.

        Raises JournalError after `limit_s` seconds, or if the writer has stopped.
        """
        with self._wake:
            if self._num_written >= position:
                return
            if self._is_over:
                raise JournalError(self.error)
            written = asyncio.get_running_loop().create_future()
            self._waiters.append(_Waiter(position, written))
        try:
            async with asyncio.timeout(limit_s):  # wait_for may lose a cancellation
                await written
        except TimeoutError:
            raise JournalError(self.error or "the disk is slow") from None

    def drain(self, limit_s: float) -> bool:
        """Block until all changes that were queued before this call are on disk, and return True.
        Return False if this takes longer than `limit_s` seconds."""
        with self._wake:
            position = self._num_put
            return self._wake.wait_for(lambda: self._num_written >= position, limit_s)

    def close(self, limit_s: float) -> bool:
        """Write the queued changes to the journal, and end the thread. Return True if all of
        them were written within `limit_s` seconds."""
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        self._thread.join(limit_s)
        return self._num_written == self._num_put

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._is_closing)
                if not self._queue:
                    break
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
            if not self._write(batch):
                return
        self._end("the journal is closed")

    def _write(self, batch: list[Change]) -> bool:
        while True:
            is_last_try = self._is_closing
            try:
                self._transact(batch)
            except _DISK_ERRORS as error:  # retried: the disk may have room again
                self._report(str(getattr(error, "orig", None) or error))
                if is_last_try:
                    num_lost = self._num_put - self._num_written
                    log.error(
                        "the journal is closed; %d changes are lost because the disk refused them",
                        num_lost,
                    )
                    self._end(f"the journal is closed: {self.error}")
                    return False
                with self._wake:
                    self._wake.wait_for(lambda: self._is_closing, RETRY_S)
            except Exception as error:  # isolated: what is not written must not be acknowledged
                log.critical("the journal is broken", exc_info=error)
                self.is_broken = True
                self._end(f"the journal is broken: {error}")
                self._on_broken()
                return False
            else:
                self._mark_written(len(batch))
                return True

    def _report(self, error: str) -> None:
        if error != self.error:
            log.error("the journal cannot be written, trying again: %s", error)
        self.error = error

    def _mark_written(self, count: int) -> None:
        if self.error is not None:
            log.warning("the journal can be written again")
            self.error = None
        with self._wake:
            self._num_written += count
            waiters, num_written = self._waiters, self._num_written
            finished = [waiter for waiter in waiters if waiter.position <= num_written]
            self._waiters = [waiter for waiter in waiters if waiter.position > num_written]
            self._wake.notify_all()
        _resolve(finished)

    def _end(self, error: str) -> None:
        with self._wake:
            self.error, self._is_over = error, True
            waiters, self._waiters = self._waiters, []
        _resolve(waiters, JournalError(error))


def _resolve(waiters: Sequence[_Waiter], failure: Exception | None = None) -> None:
    """Wake the asyncio tasks that wait for a write. The tasks may belong to several event loops.
    Each event loop gets one callback. The callback wakes all tasks of this loop."""
    futures = [waiter.written for waiter in waiters]
    for loop in {future.get_loop() for future in futures}:
        own = [future for future in futures if future.get_loop() is loop]
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_finish, own, failure)


def _finish(futures: Sequence[asyncio.Future[None]], failure: Exception | None) -> None:
    for written in futures:
        if written.done():  # the waiter was cancelled
            continue
        if failure is None:
            written.set_result(None)
        else:
            written.set_exception(failure)
