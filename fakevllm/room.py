"""How many siblings fit now, of all requests together. Pure.

Leads are not counted: each is a call that its app would have made anyway. What is bounded is what
we add to them.
"""

from __future__ import annotations

from dataclasses import dataclass

_FORGOTTEN = 1024
"""With room for so many siblings the engine's refusals are history."""


@dataclass(frozen=True, slots=True)
class Grant:
    num: int
    cut: str | None = None
    """Why it is fewer than asked for."""


class Room:
    """
    >>> room = Room(bound=4)
    >>> room.take(3), room.take(3)
    (Grant(num=3, cut=None), Grant(num=1, cut='siblings_in_flight: 1 of 3 fit'))
    """

    def __init__(self, bound: int = 0) -> None:
        """`bound` 0: none, until the engine says that it has too much to do."""
        self._bound = bound or None
        self._learnt: int | None = None
        self.in_flight = 0

    def take(self, asked: int) -> Grant:
        """Each one taken is left again."""
        by_bound = self._free(self._bound, asked)
        by_engine = self._free(self._learnt, asked)
        num = min(by_bound, by_engine)
        self.in_flight += num
        if num == asked:
            return Grant(num)
        reason = "engine_busy" if by_engine < by_bound else "siblings_in_flight"
        return Grant(num, f"{reason}: {num} of {asked} fit")

    def leave(self, num: int = 1) -> None:
        self.in_flight -= num
        assert self.in_flight >= 0, "what was not taken cannot be left"

    def heard(self, in_flight: int, num_refused: int) -> None:
        """Of a request whose lead was answered: how many siblings were in flight, and how many of
        its own the engine would not take. Each that goes well makes room for one more."""
        if num_refused:
            fitting = max(0, in_flight - num_refused)
            self._learnt = fitting if self._learnt is None else min(self._learnt, fitting)
        elif self._learnt is not None:
            self._learnt += 1
            if self._learnt >= _FORGOTTEN:
                self._learnt = None

    def _free(self, limit: int | None, asked: int) -> int:
        return asked if limit is None else min(asked, max(0, limit - self.in_flight))
