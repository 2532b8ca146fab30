"""The time limit for retries of one row while the connection is broken, and the pauses between the
retries. This module does no I/O."""

from __future__ import annotations

import random
from dataclasses import dataclass

RETRY_FOR_S = 120.0
"""Seconds for which a row is retried while the connection is broken."""
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 2.0
"""Longest pause between two attempts of a row, in seconds."""


@dataclass(slots=True)
class RetryDeadline:
    """A time limit for the retries of one dataset row. The time begins with the row's first
    failure. The time in which the row waits for the trainer (see `backpressure`) does not count.

    >>> deadline = RetryDeadline(120.0)
    >>> deadline.may_retry(at_s=500.0), deadline.may_retry(at_s=621.0)
    (True, False)
    """

    limit_s: float
    _ends_at_s: float | None = None
    _longest_pause_s: float = FIRST_PAUSE_S
    """Upper bound of the next pause."""

    def may_retry(self, at_s: float) -> bool:
        """Return True if the dataset row may be retried after a failure at the time `at_s`, which
        is in seconds of a monotonic clock. The first failure sets the deadline."""
        if self._ends_at_s is None:
            self._ends_at_s = at_s + self.limit_s
        return at_s < self._ends_at_s

    def pause(self, at_s: float) -> float | None:
        """Return the pause before the dataset row's next attempt, in seconds, after a failure at
        `at_s`. Pauses are random, and grow with each failure. Return None if the row may not be
        retried."""
        if not self.may_retry(at_s):
            return None
        pause_s = random.uniform(0, self._longest_pause_s)
        self._longest_pause_s = min(MAX_PAUSE_S, 2 * self._longest_pause_s)
        return pause_s

    def exclude_wait(self, waited_s: float) -> None:
        """Extend the deadline by `waited_s`, the seconds for which the dataset row waited for the
        trainer."""
        if self._ends_at_s is not None:
            self._ends_at_s += waited_s
