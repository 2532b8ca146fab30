"""How many siblings fit now, of all requests together, and which leads wait for them. Pure.

Leads are not counted: each is a call that its app would have made anyway. What is bounded is what
we add to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass

_FORGOTTEN = 1024
"""With room for so many siblings the engine's refusals are history."""


@dataclass(frozen=True, slots=True)
class Grant:
    num: int
    cut: str | None = None
    """Why it is fewer than asked for."""


class SiblingLimit:
    """A sibling has a place from `take` to `leave`, and is with the engine inside `with_engine`.

    >>> room = SiblingLimit(bound=4)
    >>> room.take(3), room.take(3, num_awaited=6)
    (Grant(num=3, cut=None), Grant(num=1, cut='siblings_in_flight: 1 of 3 fit'))
    """

    def __init__(self, bound: int = 0) -> None:
        """`bound` 0: none but what the apps and the engine tell."""
        self._bound = bound or None
        self._learnt: int | None = None
        self._waiting: list[Callable[[], None]] = []
        """What wakes the leads that wait, first come first."""
        self._num_begun = 0
        self._num_ended = 0
        self.in_flight = 0
        """Places taken, also of siblings that are still to be started."""

    def take(self, asked: int, *, num_awaited: int = 0, num_waiting: int | None = None) -> Grant:
        """Each one taken is left again. `num_awaited`: siblings that apps wait for, with those of
        this group if its app does. `num_waiting`: in the engine's queue, None where that is not
        known.

        Apps that wait for siblings ask for no more before they have come. Siblings that nobody
        waits for have no such bound: they shrink this group by as much as the engine cannot keep
        up with; where nobody knows how much that is, by as many as are in flight."""
        if num_waiting is None:
            num_waiting = self.in_flight
        unawaited = max(0, self.in_flight + asked - num_awaited)
        queued = min(unawaited, num_waiting)
        by_bound = self._free(self._bound, asked)
        by_engine = min(self._free(self._learnt, asked), max(0, asked - queued))
        if self._waiting:
            by_engine = 0
        num = min(by_bound, by_engine)
        self.in_flight += num
        if num == asked:
            return Grant(num)
        reason = "engine_busy" if by_engine < by_bound else "siblings_in_flight"
        return Grant(num, f"{reason}: {num} of {asked} fit")

    def leave(self, num: int = 1) -> None:
        self.in_flight -= num
        assert self.in_flight >= 0, "what was not taken cannot be left"

    # --- what the engine makes of them

    @contextlib.contextmanager
    def with_engine(self) -> Generator[None]:
        """A sibling is sampled. Its end is room for the lead that waits longest."""
        self._num_begun += 1
        try:
            yield
        finally:
            self._num_ended += 1
            self._wake()

    def looks(self) -> Callable[[], bool]:
        """Whether a sibling was with the engine at any time since now."""
        ended = self._num_ended
        return lambda: self._num_begun > ended

    @contextlib.contextmanager
    def awaited(self, wake: Callable[[], None]) -> Generator[None]:
        """A lead waits until `wake` is called, once, or for as long as it likes. Meanwhile no group
        gets siblings."""
        self._waiting.append(wake)
        if self._num_begun == self._num_ended:  # the last one has just gone
            self._wake()
        try:
            yield
        finally:
            if wake in self._waiting:
                self._waiting.remove(wake)

    def refused(self) -> None:
        """The engine had too much to do, for a sibling or for a lead: it has one too many."""
        running = self._num_begun - self._num_ended
        if running:
            fitting = running - 1
            self._learnt = fitting if self._learnt is None else min(self._learnt, fitting)

    def went_well(self) -> None:
        """A request was answered and nothing of it was refused. Makes room for one more."""
        if self._learnt is not None:
            self._learnt += 1
            if self._learnt >= _FORGOTTEN:
                self._learnt = None

    def _wake(self) -> None:
        if self._waiting:
            self._waiting.pop(0)()

    def _free(self, limit: int | None, asked: int) -> int:
        return asked if limit is None else min(asked, max(0, limit - self.in_flight))
