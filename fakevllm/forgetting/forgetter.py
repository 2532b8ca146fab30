"""Delete the contents of groups (requests with their sampled answers) from the ledger (the proxy's
database). The contents are deleted in small parts, so that records of new groups never wait long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from fakevllm.errors import LedgerError
from fakevllm.ledger.forgotten_groups import Cause, FoundGroups, Target
from fakevllm.ledger.store import Ledger
from fakevllm.ledger.writer import WriteReceipt
from fakevllm_runtime.piece_ranges import in_batches

GROUPS_PER_SLICE = 20
"""Number of groups whose contents one change deletes. A change of this size takes some
milliseconds, and records of new groups are written between two changes."""
PIECES_PER_SLICE = 50
"""Number of pieces that one change erases. A piece may have the size of a long request."""
WAIT_S = 30.0
"""Maximum seconds for which open requests and groups in flight are waited for."""
POLL_S = 0.2
TRUNCATE_S = 10.0
"""Maximum seconds for which other readers of the ledger are waited for, so that its write-ahead log
can be truncated."""


@dataclass(slots=True)
class Forgotten:
    """The result of `Forgetter.forget`, which deletes the contents of groups."""

    group_ids: list[str] = field(default_factory=list[str])
    """Groups whose contents were deleted now."""
    found: list[str] = field(default_factory=list[str])
    """All groups of the targets."""
    num_in_flight: int = 0
    num_open: int = 0
    is_log_truncated: bool = True


class Forgetter:
    """Deletes the contents of groups (requests with their answers) from one ledger, the proxy's
    database."""

    def __init__(
        self,
        ledger: Ledger,
        wait_s: float = WAIT_S,
        wait_answered: Callable[[float], Awaitable[int]] | None = None,
    ) -> None:
        """Create the object. `wait_s` is the maximum number of seconds for which `forget` waits. It
        is 0 if no proxy runs. `wait_answered(seconds)` waits until the requests that are open now
        are answered and recorded, but not longer than `seconds`. It returns the number of requests
        that are still open."""
        self._ledger = ledger
        self._wait_s = wait_s
        self._wait_answered = wait_answered
        self._lock = asyncio.Lock()
        """Lock that is held while contents are deleted, because the erasure of pieces allows only
        one deletion at a time."""
        self._is_log_truncated = True

    async def forget(self, targets: Sequence[Target]) -> Forgotten:
        """Delete the contents of all groups that `targets` (sessions, API keys or ids) select.

        First wait for requests that are being answered, and for groups whose rewards the server has
        not acknowledged yet. The wait is limited. Groups that are still not acknowledged after the
        wait keep their contents. Raises LedgerError if the ledger cannot be written.
        """
        deadline = time.monotonic() + self._wait_s
        forgotten = Forgotten()
        if self._wait_answered is not None:
            forgotten.num_open = await self._wait_answered(self._wait_s)
        async with self._lock:
            await self._ledger.flush()
            while True:
                found = await asyncio.to_thread(self._find, targets)
                await self._clear(found.ready, Cause.FORGOTTEN)
                forgotten.group_ids.extend(found.ready)
                if not found.in_flight or time.monotonic() >= deadline:
                    break
                await asyncio.sleep(POLL_S)
            forgotten.found = [*found.forgotten, *found.ready, *found.in_flight]
            forgotten.num_in_flight = len(found.in_flight)
            forgotten.is_log_truncated = await self._erase()
        return forgotten

    async def prune(self, group_ids: Sequence[str]) -> None:
        """Delete the contents of the groups `group_ids` from the ledger (the proxy's database).
        Raises LedgerError if the ledger cannot be written."""
        async with self._lock:
            await self._clear(group_ids, Cause.PRUNED)
            await self._erase()

    async def finish(self) -> None:
        """Finish deletions that were interrupted, also in earlier processes: erase the bytes that
        are left in the ledger file. If the write-ahead log could not be truncated after the last
        deletion, truncate the log now. Raises LedgerError if the ledger cannot be written."""
        async with self._lock:
            with self._ledger.reading():
                pieces = await asyncio.to_thread(self._ledger.forgotten.loose_pieces)
            if pieces or not self._is_log_truncated:
                await self._erase()

    def _find(self, targets: Sequence[Target]) -> FoundGroups:
        with self._ledger.reading():
            found = [self._ledger.forgotten.find(target) for target in targets]
        return FoundGroups(
            list(dict.fromkeys(group for one in found for group in one.ready)),
            list(dict.fromkeys(group for one in found for group in one.in_flight)),
            list(dict.fromkeys(group for one in found for group in one.forgotten)),
        )

    async def _clear(self, group_ids: Sequence[str], cause: Cause) -> None:
        for some in in_batches(group_ids, GROUPS_PER_SLICE):
            await self._written(self._ledger.forgotten.forget(some, cause, time.time()))

    async def _erase(self) -> bool:
        """Erase the bytes of deleted contents from the ledger, and truncate the write-ahead log.
        Return False if the log could not be truncated."""
        ledger = self._ledger
        with ledger.reading():
            pieces = await asyncio.to_thread(ledger.forgotten.loose_pieces)
            if pieces:
                used = await asyncio.to_thread(ledger.forgotten.used_ranges, pieces)
                for some in in_batches(pieces, PIECES_PER_SLICE):
                    await self._written(ledger.forgotten.erase(some, used))
        self._is_log_truncated = await asyncio.to_thread(ledger.truncate_log, TRUNCATE_S)
        return self._is_log_truncated

    async def _written(self, receipt: WriteReceipt) -> None:
        if not await self._ledger.is_written(receipt):
            cause = receipt.error or "the disk is slow"
            raise LedgerError(f"The ledger cannot be written ({cause}): run the command again.")
