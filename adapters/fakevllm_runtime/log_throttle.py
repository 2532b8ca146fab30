"""Rate-limit repeated log lines: the first of each kind at once, then one per interval.

`LogThrottle` does no I/O: a caller asks whether a line is due, and writes the line itself.
`ThrottledLog` applies it to the lines of a library.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
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

    Each event has a kind. Choose a kind that many events have in common: a kind that contains an
    episode's id would throttle nothing. Beyond `MAX_KINDS` kinds, the kind whose line is oldest is
    forgotten, so that its next event counts as the first again.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._lines: dict[Hashable, tuple[float, int]] = {}
        """The time of each kind's last line and the number of events suppressed since then; the
        kind with the oldest line comes first."""
        self._lock = threading.Lock()

    def due(self, kind: Hashable, now: float) -> DueLine | None:
        """Count an event of `kind`, and return a DueLine if a log line may be written now, else
        None.

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


class ThrottledLog(logging.Filter):
    """A filter that passes each message of a logger at most once per interval.

    Two messages are equal if their texts are equal before arguments are filled in. A line that
    follows suppressed ones ends with their number.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._throttle = LogThrottle(interval_s)
        self._clock = clock

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:  # two tracebacks under one message are not the same
            return True
        due = self._throttle.due(str(record.msg), self._clock())
        if due is None:
            return False
        if due.num_suppressed:
            record.msg = f"{record.getMessage()} ({due.num_suppressed} more in between)"
            record.args = ()
        return True
