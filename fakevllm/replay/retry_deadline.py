"""The time limit for retries of one row while the connection is broken. This module does no I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RetryDeadline:
    """A limit on the time since a row's first failure, after which the row is not retried. The time
    in which the row waits for the trainer (see `backpressure`) does not count.

    >>> deadline = RetryDeadline(120.0)
    >>> deadline.may_retry(at_s=500.0), deadline.may_retry(at_s=621.0)
    (True, False)
    """

    limit_s: float
    _ends_at_s: float | None = None

    def may_retry(self, at_s: float) -> bool:
        """Return True if the row may be retried after a failure at `at_s` (seconds of a monotonic
        clock). The first failure sets the deadline."""
        if self._ends_at_s is None:
            self._ends_at_s = at_s + self.limit_s
        return at_s < self._ends_at_s

    def exclude_wait(self, waited_s: float) -> None:
        """Extend the deadline by `waited_s`, the seconds for which the row waited for the
        trainer."""
        if self._ends_at_s is not None:
            self._ends_at_s += waited_s
