"""A limit on the calls that the proxy has open at the server at a time, and the queues of calls
that wait for a free slot. Leads, which are the apps' own requests, get free slots before siblings,
which the proxy adds. This module does no I/O. Waiting calls wait on asyncio futures.

Without a limit, many apps together could make the proxy open tens of thousands of connections at
once. The event loop would then be too busy to finish opening them, and a healthy server would seem
to be unreachable.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator

SIBLINGS_PER_SLOT = 3
"""Maximum number of siblings per slot, including siblings that wait for a slot. When this number is
reached, groups get fewer siblings. This limits the memory and the waiting times under heavy
load."""
LEAD_SHARE = 0.25
"""Share of the slots that siblings may not use. Therefore a lead (an app's own request) need not
wait until a sibling with a long answer ends."""


class CallSlots:
    """A limited number of slots, and two queues of calls that wait for a slot: one for leads (the
    apps' own requests) and one for siblings.

    A slot that becomes free is given to the lead that has waited longest. If no lead waits, it is
    given to the sibling that has waited longest.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = max(1, num_slots)
        self._num_for_siblings = max(1, int(self.num_slots * (1 - LEAD_SHARE)))
        self._num_leads = 0
        self._num_siblings = 0
        self._leads: deque[asyncio.Future[None]] = deque()
        self._siblings: deque[asyncio.Future[None]] = deque()

    @property
    def num_open(self) -> int:
        """Number of calls that hold a slot."""
        return self._num_leads + self._num_siblings

    @property
    def num_waiting_leads(self) -> int:
        return len(self._leads)

    @property
    def num_waiting_siblings(self) -> int:
        return len(self._siblings)

    def must_wait(self, *, is_lead: bool) -> bool:
        """Return True if a call that starts now would have to wait for a slot."""
        return bool(self._leads if is_lead else self._siblings) or not self._has_free(is_lead)

    @contextlib.asynccontextmanager
    async def slot(self, *, is_lead: bool) -> AsyncGenerator[None]:
        """Hold a slot for one call while the block runs. If no slot is free, first wait for one,
        without a time limit."""
        queue = self._leads if is_lead else self._siblings
        if self.must_wait(is_lead=is_lead):
            await self._wait(queue, is_lead)
        else:
            self._take(is_lead)
        try:
            yield
        finally:
            self._release(is_lead)

    async def _wait(self, queue: deque[asyncio.Future[None]], is_lead: bool) -> None:
        """Wait in `queue` until this call is given a slot."""
        granted = asyncio.get_running_loop().create_future()
        queue.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                with contextlib.suppress(ValueError):  # `_hand_out` may have removed it
                    queue.remove(granted)
            else:  # the slot was granted at the same moment
                self._release(is_lead)
            raise

    def _has_free(self, is_lead: bool) -> bool:
        if self.num_open >= self.num_slots:
            return False
        return is_lead or self._num_siblings < self._num_for_siblings

    def _take(self, is_lead: bool) -> None:
        if is_lead:
            self._num_leads += 1
        else:
            self._num_siblings += 1

    def _release(self, is_lead: bool) -> None:
        if is_lead:
            self._num_leads -= 1
        else:
            self._num_siblings -= 1
        self._hand_out(self._leads, is_lead=True)
        if not self._leads:
            self._hand_out(self._siblings, is_lead=False)

    def _hand_out(self, queue: deque[asyncio.Future[None]], *, is_lead: bool) -> None:
        while queue and self._has_free(is_lead):
            granted = queue.popleft()
            if not granted.done():  # a cancelled call gives its place up
                self._take(is_lead)
                granted.set_result(None)
