"""A reply of another program that all pages share, so that open pages cause few requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

MAX_AGE_S = 4.0
"""Seconds for which a reply is shown before the program is asked again."""
MAX_OLD_AGE_S = 60.0
"""Maximum age in seconds of a reply that is shown while the program is asked again. Without a reply
of this age, a page waits."""

T = TypeVar("T")


class SharedReply(Generic[T]):
    """The latest reply. At most one thread asks for a new one, and the others get the old one."""

    def __init__(self, fetch: Callable[[], T], clock: Callable[[], float]) -> None:
        """`fetch` asks for the reply, blocks the thread, and raises no error. `clock` is a
        monotonic clock in seconds."""
        self._fetch = fetch
        self._clock = clock
        self._fetching = threading.Lock()
        self._latest: tuple[float, T] | None = None
        """The latest reply, and the time at which it arrived."""
        self._num_forgotten = 0

    def get(self, timeout_s: float) -> T | None:
        """Return the reply. Return None if another thread still asks for it after `timeout_s`
        seconds, and there is no old reply that is young enough."""
        old = self._kept(MAX_OLD_AGE_S)
        if (reply := self._kept(MAX_AGE_S)) is not None:
            return reply
        if not self._fetching.acquire(timeout=timeout_s if old is None else 0.0):
            return old
        try:
            if (reply := self._kept(MAX_AGE_S)) is None:  # no other thread has fetched it
                num_forgotten = self._num_forgotten
                reply = self._fetch()
                if num_forgotten == self._num_forgotten:
                    self._latest = self._clock(), reply
            return reply
        finally:
            self._fetching.release()

    def forget(self) -> None:
        """Forget the reply, and the one that is being fetched, because both are out of date."""
        self._num_forgotten += 1
        self._latest = None

    def _kept(self, max_age_s: float) -> T | None:
        """Return the latest reply, or None if it is older than `max_age_s` seconds."""
        if self._latest is None:
            return None
        arrived_at, reply = self._latest
        return reply if self._clock() - arrived_at <= max_age_s else None
