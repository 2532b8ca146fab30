"""A limit on the proxy's open calls at the server. Each open call holds a slot, and further calls
wait in queues for a free slot.

Leads (the apps' own requests) get free slots before siblings (the calls that the proxy adds). This
module does no I/O. Waiting calls wait on asyncio futures.

Without a limit, many apps together could make the proxy open tens of thousands of connections at
once. The event loop would then be too busy to finish opening them, and a healthy server would seem
to be unreachable.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

SIBLINGS_PER_SLOT = 3
"""Maximum number of siblings per slot, including siblings that wait for a slot. When this number is
reached, groups get fewer siblings. Therefore memory and waiting times stay bounded under heavy
load."""
LEAD_SHARE = 0.25
"""Share of the slots that siblings may not use. Therefore a lead (an app's own request) need not
wait until a sibling with a long answer ends."""


class CallSlots:
    """A limited number of slots, and two queues of calls that wait for a slot. Leads (the apps' own
    requests) wait in the first queue. Sibling calls, which the proxy adds to sample more answers,
    wait in the second queue.

    A slot that becomes free is given to the lead that has waited longest. If no lead waits, the
    slot is given to the sibling call that has waited longest. A sibling call needs one slot for
    each answer that it samples, and gets all its slots at once.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = max(1, num_slots)
        self._num_for_siblings = max(1, int(self.num_slots * (1 - LEAD_SHARE)))
        self._num_leads = 0
        self._num_siblings = 0
        self._leads: deque[_Waiting] = deque()
        self._siblings: deque[_Waiting] = deque()

    @property
    def num_open(self) -> int:
        """Number of slots that are held."""
        return self._num_leads + self._num_siblings

    @property
    def num_waiting_leads(self) -> int:
        return len(self._leads)

    @property
    def num_waiting_siblings(self) -> int:
        return sum(waiting.num for waiting in self._siblings)

    @property
    def max_per_call(self) -> int:
        """Maximum number of siblings (answers to one request) that one call may sample."""
        return self._num_for_siblings

    def must_wait(self, *, is_lead: bool, num: int = 1) -> bool:
        """Return True if a new call must wait for its slots."""
        return bool(self._leads if is_lead else self._siblings) or not self._has_free(is_lead, num)

    def slot(self, *, is_lead: bool, num: int = 1) -> HeldSlots:
        """Return a context manager that holds the slots for one call. If too few slots are free,
        entering the context manager waits for slots, without a time limit.

        `num` is the number of siblings (answers to one request) that the call samples. It is at
        most `max_per_call`.
        """
        return HeldSlots(self, is_lead, num)

    async def take(self, is_lead: bool, num: int) -> None:
        """Wait until `num` slots are free, and take them. The caller gives them back with
        `release`."""
        if self.must_wait(is_lead=is_lead, num=num):
            await self._wait(is_lead, num)
        else:
            self._take(is_lead, num)

    async def _wait(self, is_lead: bool, num: int) -> None:
        queue = self._leads if is_lead else self._siblings
        waiting = _Waiting(asyncio.get_running_loop().create_future(), num)
        queue.append(waiting)
        try:
            await waiting.granted
        except asyncio.CancelledError:
            if waiting.granted.cancelled():
                with contextlib.suppress(ValueError):  # `_hand_out` may have removed it
                    queue.remove(waiting)
                self._hand_out_all()  # a call that needs fewer slots may be the first one now
            else:  # the slots were granted at the same moment
                self.release(is_lead, num)
            raise

    def _has_free(self, is_lead: bool, num: int) -> bool:
        if self._num_leads + self._num_siblings + num > self.num_slots:
            return False
        return is_lead or self._num_siblings + num <= self._num_for_siblings

    def _take(self, is_lead: bool, num: int) -> None:
        if is_lead:
            self._num_leads += num
        else:
            self._num_siblings += num

    def release(self, is_lead: bool, num: int) -> None:
        """Give `num` slots back, and pass them on to calls that wait for slots."""
        if is_lead:
            self._num_leads -= num
        else:
            self._num_siblings -= num
        if self._leads or self._siblings:
            self._hand_out_all()

    def _hand_out_all(self) -> None:
        self._hand_out(self._leads, is_lead=True)
        if not self._leads:
            self._hand_out(self._siblings, is_lead=False)

    def _hand_out(self, queue: deque[_Waiting], *, is_lead: bool) -> None:
        while queue and self._has_free(is_lead, queue[0].num):
            waiting = queue.popleft()
            if not waiting.granted.done():  # a cancelled call gives its place up
                self._take(is_lead, waiting.num)
                waiting.granted.set_result(None)


class HeldSlots:
    """Context manager that holds slots while one call is open. The context manager yields a
    function that gives one of the slots back before the block ends. This is a class and not a
    generator, because a generator would cost more time for every request."""

    def __init__(self, slots: CallSlots, is_lead: bool, num: int) -> None:
        self._slots = slots
        self._is_lead = is_lead
        self._num = num

    async def __aenter__(self) -> Callable[[], None]:
        await self._slots.take(self._is_lead, self._num)
        return self._give_back_one

    async def __aexit__(self, *_: object) -> None:
        self._slots.release(self._is_lead, self._num)

    def _give_back_one(self) -> None:
        if self._num:
            self._num -= 1
            self._slots.release(self._is_lead, 1)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call that waits for its slots."""

    granted: asyncio.Future[None]
    num: int
