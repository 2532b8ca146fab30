"""Limit on the number of siblings in flight, summed over all requests. This module does no I/O.

Each request has one lead. The lead is the call to the engine that the app would have made without
the proxy. In this module, siblings are only the further calls that the proxy adds. Leads do not
count against the limit. If siblings keep the engine busy, the engine may refuse a lead. The refused
lead waits in a queue until a sibling ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass

from fakevllm.ledger.reasons import EndReason

_MAX_ENGINE_LIMIT = 1024
"""A limit that was derived from the engine's refusals is dropped when it reaches this number. Each
answered request raises the derived limit by one."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The number of siblings that a group may start, and the reason if the number is smaller than
    requested. A group is a request with its siblings (answers that the proxy samples for it)."""

    num: int
    """Number of siblings that the group may start."""
    cut_reason: str | None = None
    """Reason why `num` is less than requested; None if the group gets all requested siblings."""


class SiblingLimit:
    """Counter of the siblings in flight, with two limits. Siblings are the answers that the proxy
    samples for a request besides the answer to the app's own call. The first limit is configured.
    The second limit exists only after the engine has refused requests because of overload, and is
    derived from these refusals.

    A sibling counts as in flight from `acquire` until `release`. It counts as being at the engine
    only during the `with` block of `sampling`.

    >>> limit = SiblingLimit(fixed_limit=4)
    >>> limit.acquire(3), limit.acquire(3, num_awaited=6)
    (Grant(num=3, cut_reason=None), Grant(num=1, cut_reason='siblings_in_flight: 1 of 3 fit'))
    """

    def __init__(self, fixed_limit: int = 0) -> None:
        """Create the counter. `fixed_limit` is the configured maximum number of siblings (answers
        that the proxy samples additionally) in flight; 0 means that no limit is configured."""
        self._fixed_limit = fixed_limit or None
        self._engine_limit: int | None = None
        """Limit derived from the engine's refusals; None if the engine has not refused a request
        recently."""
        self._waiting_leads: list[Callable[[], None]] = []
        """Callbacks of the leads that the engine refused and that wait for a sibling to end, in the
        order of their arrival. A callback wakes its lead."""
        self._num_started = 0
        self._num_ended = 0
        self.in_flight = 0
        """Number of siblings between `acquire` and `release`, including siblings that have not been
        sent yet."""

    def acquire(
        self, num_requested: int, *, num_awaited: int = 0, num_waiting: int | None = None
    ) -> Grant:
        """Reserve capacity for a group's siblings (answers that the proxy samples additionally).
        Return the number of siblings that may start. Each time one of these siblings ends, the
        caller must call `release`.

        Three rules limit this number:

        * The configured limit, and the limit derived from the engine's refusals, must leave room
          for the siblings.
        * The number is 0 while a lead that the engine has refused waits.
        * Siblings must not pile up in the engine's queue. Only siblings for which no app waits can
          pile up, because an app usually sends no further request before it has its answer. The
          number of such siblings, in flight or requested now, is subtracted from `num_requested`.
          At most `num_waiting` is subtracted.

        `num_awaited` is the number of siblings for which an app waits, among the siblings in flight
        and the siblings that this call requests. `num_waiting` is the number of requests in the
        engine's queue. If `num_waiting` is None (unknown), the number of siblings in flight is used
        instead.
        """
        if num_waiting is None:
            num_waiting = self.in_flight
        num_unawaited = max(0, self.in_flight + num_requested - num_awaited)
        num_queued = min(num_unawaited, num_waiting)
        by_fixed_limit = self._free(self._fixed_limit, num_requested)
        by_engine = min(
            self._free(self._engine_limit, num_requested), max(0, num_requested - num_queued)
        )
        if self._waiting_leads:
            by_engine = 0
        num = min(by_fixed_limit, by_engine)
        self.in_flight += num
        if num == num_requested:
            return Grant(num)
        reason = (
            EndReason.ENGINE_BUSY.value
            if by_engine < by_fixed_limit
            else EndReason.SIBLINGS_IN_FLIGHT.value
        )
        return Grant(num, f"{reason}: {num} of {num_requested} fit")

    def release(self, num: int = 1) -> None:
        """Give back the capacity of `num` siblings (sampled answers) that have ended. The capacity
        was reserved with `acquire`."""
        self.in_flight -= num
        assert self.in_flight >= 0, "capacity was released that had not been acquired"

    # --- siblings at the engine, and its refusals

    @contextlib.contextmanager
    def sampling(self, num: int = 1) -> Generator[Callable[[], None]]:
        """While the `with` block runs, count `num` siblings (answers that the proxy samples
        additionally) as being at the engine. The block gets a function, and must call it each time
        one of these siblings ends. Siblings that have not ended at the end of the block count as
        ended then.

        Leads (apps' own requests) that the engine has refused wait in a queue. Each time a sibling
        ends, the first lead in this queue is woken.
        """
        self._num_started += num
        num_running = num

        def end_one() -> None:
            nonlocal num_running
            num_running -= 1
            self._num_ended += 1
            self._wake_first_lead()

        try:
            yield end_one
        finally:
            while num_running:
                end_one()

    def watch_engine(self) -> Callable[[], bool]:
        """Return a function that returns True if the engine has sampled a sibling at any time since
        `watch_engine` was called. Siblings are answers that the proxy samples additionally."""
        num_ended = self._num_ended
        return lambda: self._num_started > num_ended

    @contextlib.contextmanager
    def lead_waiting(self, wake: Callable[[], None]) -> Generator[None]:
        """Let a lead (an app's own request) wait, because the engine has refused it. The lead is in
        the queue of waiting leads until it is woken, or until the `with` block ends. While this
        queue is not empty, no siblings (additional answers) are granted.

        `wake` is called, at most once, when a sibling ends and this lead is the first in the queue.
        If the engine is sampling no sibling when the block begins, the first lead in the queue is
        woken immediately. After the block has ended, `wake` is not called.
        """
        self._waiting_leads.append(wake)
        if self._num_started == self._num_ended:  # the last sibling has just ended
            self._wake_first_lead()
        try:
            yield
        finally:
            if wake in self._waiting_leads:
                self._waiting_leads.remove(wake)

    def engine_refused(self) -> None:
        """Record that the engine refused a request because of overload. Lower the limit on siblings
        (additional answers) that is derived from refusals. The new limit is at most the number of
        siblings that the engine is sampling, minus one. If the engine is sampling no sibling, do
        not change the limit."""
        num_running = self._num_started - self._num_ended
        if num_running:
            num_fitting = num_running - 1
            known = self._engine_limit
            self._engine_limit = num_fitting if known is None else min(known, num_fitting)

    def request_succeeded(self) -> None:
        """Record that the engine answered a request. If there is a limit on siblings (additional
        answers) that is derived from the engine's refusals, raise this limit by one. Drop this
        limit when it reaches _MAX_ENGINE_LIMIT."""
        if self._engine_limit is not None:
            self._engine_limit += 1
            if self._engine_limit >= _MAX_ENGINE_LIMIT:
                self._engine_limit = None

    def _wake_first_lead(self) -> None:
        if self._waiting_leads:
            self._waiting_leads.pop(0)()

    def _free(self, limit: int | None, num_requested: int) -> int:
        if limit is None:
            return num_requested
        return min(num_requested, max(0, limit - self.in_flight))
