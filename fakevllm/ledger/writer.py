"""The single thread that writes the ledger (the proxy's SQLite file), and the bounded queue of
changes for this thread.

`Writer.put` queues a change. `Writer.put` never waits and never raises. It returns a
`WriteReceipt`, which later shows if the change was written. The thread writes the queued changes in
batches, and each batch is one transaction.

A change that cannot be written is dropped and counted, and the other changes of its batch are still
written. If several changes in a row are dropped, the log reports the first one and the end of the
series.
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
WrittenChange = TypeVar("WrittenChange", contravariant=True)

QUEUE_BOUND = 5_000
"""Maximum number of queued changes. The queue is large enough for the changes of several seconds
under the heaviest load, because another process may hold the file's lock for some seconds."""
MAX_BATCH = 1_000
"""Maximum number of changes in one transaction."""
GATHER_S = 0.025
"""Seconds for which the thread collects further changes before it writes a batch. The time is
short, because changes that are not written yet are lost if the process is killed."""


@dataclass(slots=True)
class WriteReceipt:
    """The outcome of one queued change to the ledger. The writer's thread sets the outcome. After
    `Writer.flush` has returned True, the outcome is final.

    >>> WriteReceipt().is_written
    False
    """

    is_written: bool = False
    error: str | None = None
    """Error because of which the change was dropped. None if the change is still queued or was
    written."""


@dataclass(frozen=True, slots=True)
class FlushMark:
    """A mark in the writer's queue of changes. All changes that were queued before the mark are
    first written or dropped. Then the writer's thread calls `on_reached`."""

    on_reached: Callable[[], object]


class Transact(Protocol[WrittenChange]):
    """A function that writes a batch of changes to the ledger (the proxy's SQLite file) in one
    transaction."""

    def __call__(self, changes: Sequence[WrittenChange], /) -> bool:
        """Write all changes to the ledger (the proxy's SQLite file) in order, or none of them.
        Return True if any row changed.

        False does not prove that the ledger can be written: a transaction that changes no row
        succeeds even on a full disk. Raises OperationalError if the file cannot be written. Raises
        any other exception if one of the changes is invalid.
        """
        ...


class Writer(Generic[Change]):
    """A queue of changes, and the thread that writes the changes to the ledger. `close` ends the
    thread."""

    def __init__(self, transact: Transact[Change]) -> None:
        self._transact = transact
        # A SimpleQueue takes far less CPU time than a Queue. It has no bound, so `put` checks one.
        self._queue: queue.SimpleQueue[tuple[Change, WriteReceipt] | FlushMark | None]
        self._queue = queue.SimpleQueue()
        self._hurry = threading.Event()
        # Two counters, because `put` and the writer's thread would race for one.
        self._num_refused = 0
        self._num_failed = 0
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Number of changes that were dropped since the writer was created. These changes are not
        in the ledger."""
        return self._num_refused + self._num_failed

    @property
    def num_waiting(self) -> int:
        """Number of changes that wait to be written to the ledger (the proxy's SQLite file)."""
        return self._queue.qsize()

    @property
    def error(self) -> str | None:
        """Error message of the latest change that was dropped and not written to the ledger. None
        if a later change was written."""
        return self._error

    @property
    def _is_full(self) -> bool:
        return self._queue.qsize() >= QUEUE_BOUND

    def put(self, change: Change) -> WriteReceipt:
        """Queue a change for the thread that writes to the ledger. Drop the change if the queue is
        full."""
        receipt = WriteReceipt()
        if self._is_full:
            self._num_refused += 1
            receipt.error = "the queue is full"
            self._report(receipt.error)
        else:
            self._queue.put((change, receipt))
        return receipt

    def drain(self, timeout_s: float) -> bool:
        """Block the calling thread until every change that was queued before this call is written
        to the ledger or dropped. Return True if this happened within the timeout."""
        done = threading.Event()
        self._queue.put(FlushMark(done.set))
        self._hurry.set()
        return done.wait(timeout_s)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until every change that was queued before this call is written to the ledger or
        dropped. Return True if this happened within the timeout. Return False at once if the queue
        is full.

        This method blocks no thread and does not hasten the writer. The current batch is written at
        its usual time.
        """
        loop = asyncio.get_running_loop()
        is_reached = asyncio.Event()

        def notify() -> None:
            if not loop.is_closed():  # the caller may have been cancelled, and its loop closed
                loop.call_soon_threadsafe(is_reached.set)

        if self._is_full:
            return False
        self._queue.put(FlushMark(notify))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # wait_for may lose a cancellation before 3.12
                await is_reached.wait()
        return is_reached.is_set()

    def close(self, timeout_s: float) -> None:
        """Write the queued changes to the ledger, then end the writer's thread. Wait at most
        `timeout_s` seconds for this."""
        self._queue.put(None)
        self._hurry.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            batch = [self._queue.get()]
            self._hurry.wait(GATHER_S)
            self._hurry.clear()
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            is_closing = None in batch
            self._write([item for item in batch if isinstance(item, tuple)])
            for item in batch:
                if isinstance(item, FlushMark):
                    item.on_reached()

    def _write(self, batch: Sequence[tuple[Change, WriteReceipt]]) -> None:
        if not batch:
            return
        try:
            has_changed_rows = self._transact([change for change, _ in batch])
        except (
            OperationalError,
            sqlite3.OperationalError,
        ) as error:  # isolates: the disk is full or the file locked; the app gets its answer
            self._drop(batch, error)
        except Exception as error:  # isolates: one bad change must not fail the rest of the batch
            if len(batch) == 1:
                return self._drop(batch, error)
            for item in batch:
                self._write([item])
        else:
            for _, receipt in batch:
                receipt.is_written = True
            if not has_changed_rows:
                return
            if self._error is not None:
                log.warning("the ledger is written again; %d writes were dropped", self.num_dropped)
            self._error = None

    def _drop(self, batch: Sequence[tuple[Change, WriteReceipt]], error: Exception) -> None:
        message = str(getattr(error, "orig", None) or error)
        for _, receipt in batch:
            receipt.error = message
        self._num_failed += len(batch)
        self._report(message)

    def _report(self, message: str) -> None:
        if self._error is None:
            log.error("the ledger cannot be written, groups go unrecorded: %s", message)
        self._error = message
