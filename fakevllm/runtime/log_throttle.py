"""Lines about what happens again and again: each kind at once, then now and then with a number.
Pure; any number of threads may ask."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass

MAX_KINDS = 256
"""What is told of more kinds at once, nobody reads."""


@dataclass(frozen=True, slots=True)
class Due:
    is_first: bool
    """Of its kind."""
    num_untold: int
    """Of its kind since the last line, without this one."""


class Seldom:
    """What tells episodes apart is no part of a kind. Of more than MAX_KINDS the one that was told
    longest ago is forgotten, and would be the first again."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._told: dict[Hashable, tuple[float, int]] = {}
        """When, and how many of it came since; what was told longest ago first."""
        self._lock = threading.Lock()

    def due(self, kind: Hashable, now: float) -> Due | None:
        """None: not now.

        >>> seldom = Seldom(5.0)
        >>> seldom.due("a", 0.0), seldom.due("a", 1.0), seldom.due("a", 5.0)
        (Due(is_first=True, num_untold=0), None, Due(is_first=False, num_untold=1))
        """
        with self._lock:
            told = self._told.get(kind)
            if told is not None and now - told[0] < self._every_s:
                self._told[kind] = told[0], told[1] + 1
                return None
            self._told.pop(kind, None)
            self._told[kind] = now, 0
            if len(self._told) > MAX_KINDS:
                del self._told[next(iter(self._told))]
            return Due(True, 0) if told is None else Due(False, told[1])
