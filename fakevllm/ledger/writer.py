"""The one thread that writes the ledger, behind a bounded queue.

Putting never waits and never raises. What waits is written in one transaction; what cannot be
written is dropped, counted and logged once per trouble.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from sqlalchemy.exc import OperationalError

log = logging.getLogger("fakevllm.ledger")

Change = TypeVar("Change")
Taken = TypeVar("Taken", contravariant=True)

QUEUE_BOUND = 5_000
"""Some seconds of the busiest traffic, while another process holds the file's lock."""
MAX_BATCH = 1_000
GATHER_S = 0.01
"""A change waits this long for company: a transaction costs more than a group. What a
kill -9 finds waiting is in no ledger, so it is not long."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the queue: `reached` is called, on the writer's thread, when all before it is
    written or dropped."""

    reached: Callable[[], object]


class Transact(Protocol[Taken]):
    def __call__(self, changes: Sequence[Taken], /) -> bool:
        """All of them or none, in order. Whether anything had to be written: what changes no row
        goes well on a full disk too. Raises OperationalError where the file is the trouble."""
        ...


class Writer(Generic[Change]):
    def __init__(self, transact: Transact[Change]) -> None:
        self._transact = transact
        self._queue: queue.Queue[Change | Mark | None] = queue.Queue(QUEUE_BOUND)
        self._hurry = threading.Event()
        self._refused = 0
        self._failed = 0
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        return self._refused + self._failed

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    @property
    def error(self) -> str | None:
        return self._error

    def put(self, change: Change) -> None:
        try:
            self._queue.put_nowait(change)
        except queue.Full:
            self._refused += 1
            self._trouble("the queue is full")

    def drain(self, timeout_s: float) -> bool:
        """Whether all that was put before has been written or dropped."""
        done = threading.Event()
        try:
            self._queue.put(Mark(done.set), timeout=timeout_s)
        except queue.Full:
            return False
        self._hurry.set()
        return done.wait(timeout_s)

    async def flush(self, timeout_s: float) -> bool:
        """drain() for an event loop: costs no thread, and hurries nobody."""
        loop = asyncio.get_running_loop()
        written = asyncio.Event()

        def tell() -> None:
            if not loop.is_closed():  # whoever asked may have given up and gone
                loop.call_soon_threadsafe(written.set)

        try:
            self._queue.put_nowait(Mark(tell))
        except queue.Full:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # wait_for may lose a cancel, before 3.12
                await written.wait()
        return written.is_set()

    def close(self, timeout_s: float) -> None:
        """Writes what waits, then ends the thread."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._hurry.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            taken = [self._queue.get()]
            self._hurry.wait(GATHER_S)
            self._hurry.clear()
            while len(taken) < MAX_BATCH and not self._queue.empty():
                taken.append(self._queue.get())
            is_closing = None in taken
            self._write([one for one in taken if not isinstance(one, Mark | None)])
            for one in taken:
                if isinstance(one, Mark):
                    one.reached()

    def _write(self, changes: list[Change]) -> None:
        if not changes:
            return
        try:
            is_written = self._transact(changes)
        except (
            OperationalError,
            sqlite3.OperationalError,
        ) as error:  # isolates: disk full, file locked; the app is answered
            self._fail(len(changes), error)
        except Exception as error:  # isolates: one bad change must not take its company along
            if len(changes) == 1:
                return self._fail(1, error)
            for change in changes:
                self._write([change])
        else:
            if not is_written:
                return
            if self._error is not None:
                log.warning("the ledger is written again; %d writes were dropped", self.dropped)
            self._error = None

    def _fail(self, count: int, error: Exception) -> None:
        self._failed += count
        self._trouble(str(getattr(error, "orig", None) or error))

    def _trouble(self, message: str) -> None:
        if self._error is None:
            log.error("the ledger cannot be written, groups go unrecorded: %s", message)
        self._error = message
