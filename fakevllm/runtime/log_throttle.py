"""Rate-limit repeated log lines: the first of each kind at once, then one per interval.

The module does no I/O: a caller asks whether a line is due, and writes the line itself.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass

MAX_KINDS = 256
"""Maximum number of message kinds tracked."""


@dataclass(frozen=True, slots=True)
class DueLine:
    """A log line that may be written now."""

    is_first: bool
    """Whether this is the first event of its kind."""
    num_suppressed: int
    """Number of events of this kind since the previous line, without this event."""


class LogThrottle:
    """A rate limit that decides for each event whether its log line is due. Thread-safe.

    Choose a kind that many events share: a kind with an episode's id in it would throttle nothing.
    Beyond `MAX_KINDS` kinds, the kind whose line is oldest is forgotten, so that its next event
    counts as the first again.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._lines: dict[Hashable, tuple[float, int]] = {}
        """The time of each kind's last line and the number of events suppressed since then; the
        kind with the oldest line comes first."""
        self._lock = threading.Lock()

    def due(self, kind: Hashable, now: float) -> DueLine | None:
        """Count an event, and return its line, or None if the interval has not passed.

        `now` is in seconds of any monotonic clock.

        >>> throttle = LogThrottle(5.0)
        >>> throttle.due("a", 0.0), throttle.due("a", 1.0), throttle.due("a", 5.0)
        (DueLine(is_first=True, num_suppressed=0), None, DueLine(is_first=False, num_suppressed=1))
        """
        with self._lock:
            last = self._lines.get(kind)
            if last is not None and now - last[0] < self._interval_s:
                self._lines[kind] = last[0], last[1] + 1
                return None
            self._lines.pop(kind, None)
            self._lines[kind] = now, 0
            if len(self._lines) > MAX_KINDS:
                del self._lines[next(iter(self._lines))]
            return DueLine(True, 0) if last is None else DueLine(False, last[1])
