"""The one thread that writes the journal. What waits while a transaction is flushed to disk goes
into the next, so a thousand writers cost about as many flushes as ten.

A transaction that the disk does not take is tried again until it does: memory is ahead of the file
by what waits here, and nothing of that has been acknowledged. Anything else that goes wrong is a
defect of ours or a damaged file, and ends the writing for good.
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
MAX_WAITING = 10_000
"""Changes beyond which nothing new is taken."""
RETRY_S = 0.5
_DISK = (OperationalError, sqlite3.OperationalError)


@dataclass(frozen=True, slots=True)
class Change:
    """Part of a transaction."""

    label: str
    """What it is, for crash points."""
    make: Callable[[Connection], object]


class JournalError(Exception):
    """Something is not in the journal, or not yet."""


@dataclass(frozen=True, slots=True)
class _Waiter:
    place: int
    written: asyncio.Future[None]


class JournalWriter:
    def __init__(
        self,
        transact: Callable[[Sequence[Change]], None],
        on_broken: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_broken` is called, on the writer's thread, when it will never write again."""
        self._transact = transact
        self._on_broken = on_broken
        self._wake = threading.Condition()
        self._waiting: deque[Change] = deque()
        self._num_put = 0
        self._num_written = 0
        self._is_closing = False
        self._waiters: list[_Waiter] = []
        self.trouble: str | None = None
        """Why nothing is written now; None while all goes well."""
        self._is_over = False
        """Nothing will ever be written again."""
        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        return self._num_put - self._num_written > MAX_WAITING

    @property
    def last_place(self) -> int:
        """Of what has been put by now."""
        return self._num_put

    @property
    def reached(self) -> int:
        """The place up to which all is on disk."""
        return self._num_written

    @property
    def is_settled(self) -> bool:
        return self._num_written == self._num_put

    def put(self, change: Change) -> int:
        """Its place in the queue, for `reach`."""
        with self._wake:
            self._waiting.append(change)
            self._num_put += 1
            self._wake.notify()
            return self._num_put

    async def reach(self, place: int, limit_s: float | None = None) -> None:
        """Until all up to `place` is on disk. Raises JournalError where that is not so after
        `limit_s`, or never will be."""
        with self._wake:
            if self._num_written >= place:
                return
            if self._is_over:
                raise JournalError(self.trouble)
            written = asyncio.get_running_loop().create_future()
            self._waiters.append(_Waiter(place, written))
        try:
            async with asyncio.timeout(limit_s):  # wait_for may lose a cancellation
                await written
        except TimeoutError:
            raise JournalError(self.trouble or "the disk is slow") from None

    def drain(self, limit_s: float) -> bool:
        """Whether all that was put before is on disk; blocks."""
        with self._wake:
            place = self._num_put
            return self._wake.wait_for(lambda: self._num_written >= place, limit_s)

    def close(self, limit_s: float) -> bool:
        """Writes what waits; whether it could."""
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        self._thread.join(limit_s)
        return self._num_written == self._num_put

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    break
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
            if not self._write(batch):
                return
        self._end("the journal is closed")

    def _write(self, batch: list[Change]) -> bool:
        while True:
            is_last_try = self._is_closing
            try:
                self._transact(batch)
            except _DISK as error:  # retried: the disk may have room again
                self._tell(str(getattr(error, "orig", None) or error))
                if is_last_try:
                    num_lost = self._num_put - self._num_written
                    log.error("closed without %d changes that the disk did not take", num_lost)
                    self._end(f"the journal is closed: {self.trouble}")
                    return False
                with self._wake:
                    self._wake.wait_for(lambda: self._is_closing, RETRY_S)
            except Exception as error:  # isolates: what is not written must not be acknowledged
                log.critical("the journal is broken", exc_info=error)
                self._end(f"the journal is broken: {error}")
                self._on_broken()
                return False
            else:
                self._written(len(batch))
                return True

    def _tell(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.error("the journal cannot be written, trying on: %s", trouble)
        self.trouble = trouble

    def _written(self, count: int) -> None:
        if self.trouble is not None:
            log.warning("the journal is written again")
            self.trouble = None
        with self._wake:
            self._num_written += count
            reached = [one for one in self._waiters if one.place <= self._num_written]
            self._waiters = [one for one in self._waiters if one.place > self._num_written]
            self._wake.notify_all()
        _resolve(reached)

    def _end(self, trouble: str) -> None:
        with self._wake:
            self.trouble, self._is_over = trouble, True
            waiters, self._waiters = self._waiters, []
        _resolve(waiters, JournalError(trouble))


def _resolve(waiters: Sequence[_Waiter], failure: Exception | None = None) -> None:
    """One call into each loop, however many wait there."""
    for loop in {one.written.get_loop() for one in waiters}:
        own = [one.written for one in waiters if one.written.get_loop() is loop]
        with contextlib.suppress(RuntimeError):  # that loop is closed
            loop.call_soon_threadsafe(_finish, own, failure)


def _finish(waiters: Sequence[asyncio.Future[None]], failure: Exception | None) -> None:
    for written in waiters:
        if written.done():  # whoever waited has given up
            continue
        if failure is None:
            written.set_result(None)
        else:
            written.set_exception(failure)
