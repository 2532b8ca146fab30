"""Limits on concurrent calls, in total and per API key. This module does no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from fakevllm_adapters.protocol.errors import WireError, error_body
from fakevllm_adapters.protocol.keys import fingerprint

RETRY_AFTER_S = 2
"""Seconds in the header `Retry-After`. Clients' SDKs sleep exactly that long before they retry."""


class OpenCalls:
    """Counts of the calls that are open now, in total and per API key. Each count has a limit.

    A limit of 0 means that there is no limit.
    """

    def __init__(
        self,
        most: int = 0,
        most_per_key: int = 0,
        counted_as: Callable[[str], str] = fingerprint,
    ) -> None:
        """Set the limits: `most` open calls in total, and `most_per_key` open calls per API key.

        The function `counted_as` maps a key to a name. Keys with the same name share one count and
        one limit. The name of a key must not change while the key has open calls. Otherwise `leave`
        would reduce the wrong count.
        """
        self._counted_as = counted_as
        self._most = most
        self._most_per_key = most_per_key
        self._num = 0
        self._by_key: Counter[str] = Counter()

    def enter(self, key: str | None) -> WireError | None:
        """Add a new call to the counts of open calls and return None, or return a 429 error if a
        limit is reached.

        Call `leave` when a counted call has ended.
        """
        name = self._counted_as(key) if key else ""
        if 0 < self._most <= self._num:
            return _busy(f"{self._most} requests are open, which is the most at a time.")
        if 0 < self._most_per_key <= self._by_key[name]:
            return _busy(f"This key has {self._most_per_key} requests open, its most at a time.")
        self._num += 1
        self._by_key[name] += 1
        return None

    def leave(self, key: str | None) -> None:
        """Subtract a call that has ended from the counts of open calls. `enter` must have counted
        the call."""
        name = self._counted_as(key) if key else ""
        self._num -= 1
        self._by_key[name] -= 1
        if self._by_key[name] == 0:
            del self._by_key[name]  # so that the dict has no more entries than open calls

    @property
    def num(self) -> int:
        """Number of calls that are open now, over all API keys."""
        return self._num


def _busy(message: str) -> WireError:
    return WireError(429, error_body(message, "Too Many Requests", 429), RETRY_AFTER_S)
