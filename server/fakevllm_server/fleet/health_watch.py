"""Decides from a series of health checks whether a replica answers, is suspect, or hangs."""

from __future__ import annotations

from enum import Enum

CHECK_INTERVAL_S = 1.0
"""Seconds between two health checks of a replica. A check costs the replica less than 1 ms."""
HUNG_AFTER_CHECKS = 3
"""Number of failed checks in a row after which a replica hangs. Each check has a timeout of five
seconds. If this server itself was suspended, only one check fails."""


class Health(Enum):
    """The result of the latest health checks."""

    GOOD = "good"
    SUSPECT = "suspect"
    """The latest check failed. The replica gets no new calls until a check succeeds."""
    HUNG = "hung"
    """The latest HUNG_AFTER_CHECKS checks failed. The replica is ended."""


class HealthWatch:
    """The health checks of one replica. Add the results in the order of time."""

    def __init__(self, hung_after: int = HUNG_AFTER_CHECKS) -> None:
        self._hung_after = hung_after
        self._num_failed = 0

    def observe(self, *, is_healthy: bool) -> Health:
        """Add the result of a check, and return the replica's health.

        >>> watch = HealthWatch(hung_after=2)
        >>> [watch.observe(is_healthy=good).value for good in (True, False, True, False, False)]
        ['good', 'suspect', 'good', 'suspect', 'hung']
        """
        self._num_failed = 0 if is_healthy else self._num_failed + 1
        if self._num_failed >= self._hung_after:
            return Health.HUNG
        return Health.SUSPECT if self._num_failed else Health.GOOD
