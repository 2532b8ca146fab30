"""Lines about what happens again and again: each kind at once, then now and then with a number.
Pure; any number of threads may ask."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

MAX_KINDS = 1000
"""That are remembered; of more, the one that was told longest ago is new again."""


@dataclass(frozen=True, slots=True)
class Due:
    is_first: bool
    """Of its kind."""
    num_untold: int
    """Of its kind since the last line, without this one."""


class Seldom:
    """Keeps a time for each kind: what tells episodes apart is no part of it."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._told_at: dict[Hashable, float] = {}
        self._num_untold: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def due(self, kind: Hashable, now: float) -> Due | None:
        """None: not now.

        >>> seldom = Seldom(5.0)
        >>> seldom.due("a", 0.0), seldom.due("a", 1.0), seldom.due("a", 5.0)
        (Due(is_first=True, num_untold=0), None, Due(is_first=False, num_untold=1))
        """
        with self._lock:
            told_at = self._told_at.get(kind)
            if told_at is not None and now - told_at < self._every_s:
                self._num_untold[kind] += 1
                return None
            # In the order they were told.
            self._told_at.pop(kind, None)
            self._told_at[kind] = now
            due = Due(told_at is None, self._num_untold.pop(kind, 0))
            if len(self._told_at) > MAX_KINDS:
                oldest = next(iter(self._told_at))
                del self._told_at[oldest], self._num_untold[oldest]
            return due
