"""Decide which loaded versions of the weights can be unloaded, because no evaluation needs these
versions any longer. This module does no I/O, and gets the time as an argument.

The command `fakevllm eval` unloads its versions at its end. If the command was killed, the proxy
unloads the versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

IDLE_S = 600.0
"""Seconds without a request of an evaluation after which the proxy unloads a version. The time is
longer than an evaluation of several versions usually needs for one row. A version that is unloaded
too early is loaded again with the next row."""


class LoadedVersions:
    """The versions that evaluations have loaded, with the time of each version's last use.

    >>> versions = LoadedVersions(idle_s=600.0)
    >>> versions.begin([3])
    >>> versions.take_idle(5000.0)
    []
    >>> versions.end([3], 5000.0)
    >>> versions.take_idle(5599.0), versions.take_idle(5600.0), versions.take_idle(9999.0)
    ([], [3], [])
    """

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._num_uses: Counter[int] = Counter()
        """Number of requests that are loading or sampling each version at the moment."""
        self._last_used_s: dict[int, float] = {}

    def begin(self, versions: Iterable[int]) -> None:
        """Record that a request starts to load `versions`, or to sample with them. Call `end` when
        the request has ended."""
        self._num_uses.update(versions)

    def end(self, versions: Iterable[int], now_s: float) -> None:
        """Record the end of a request that loaded `versions`, or sampled with them. Call this
        method for a failed request too."""
        for version in versions:
            self._num_uses[version] -= 1
            assert self._num_uses[version] >= 0, "a use ended that had not begun"
            self._last_used_s[version] = now_s

    def forget(self, version: int) -> None:
        """Record that a version has been unloaded."""
        self._last_used_s.pop(version, None)

    def take_idle(self, now_s: float) -> list[int]:
        """Return the versions that have been idle long enough to be unloaded now. Forget these
        versions."""
        idle = [
            version
            for version, used_s in self._last_used_s.items()
            if now_s - used_s >= self._idle_s and not self._num_uses[version]
        ]
        for version in idle:
            self.forget(version)
        return idle
