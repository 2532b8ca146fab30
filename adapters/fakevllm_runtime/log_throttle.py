"""Rate-limit repeated log lines. The first line of each kind is written at once. Further lines of
this kind are written at most once per interval.

`LogThrottle` writes nothing itself. It decides whether the caller may write a line. `ThrottledLog`
is a logging filter that applies a LogThrottle to the log lines of a library.
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
    """Permission to write the log line of an event, with the number of earlier lines that were
    suppressed."""

    is_first: bool
    """Whether this is the first event of its kind."""
    num_suppressed: int
    """Number of events of this kind since the last written line, not counting this event."""


class LogThrottle:
    """A rate limit that decides for each event whether its log line may be written.

    Each event has a kind, and the limit applies to each kind separately. Choose kinds that many
    events share. If a kind contains an episode's id, for example, nearly every event has a kind of
    its own, and nothing is suppressed. At most `MAX_KINDS` kinds are tracked. If there are more,
    the kind whose last line is oldest is forgotten. The next event of this kind counts as its first
    event. The class is thread-safe.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._lines: dict[Hashable, tuple[float, int]] = {}
        """For each kind: the time of its last line, and the number of events suppressed since then.
        The kind whose last line is oldest comes first."""
        self._lock = threading.Lock()

    def due(self, kind: Hashable, now: float) -> DueLine | None:
        """Count an event of `kind`. Return a DueLine if the event may be logged, else None.

        `now` is the time in seconds of any monotonic clock.

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
    """A logging filter that passes each message of a logger at most once per interval.

    Two messages count as equal if their format strings are equal. The arguments of the messages are
    not compared. If lines were suppressed, the next written line ends with the number of suppressed
    lines. Lines with a traceback always pass.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._throttle = LogThrottle(interval_s)
        self._clock = clock

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:  # lines with the same message may have different tracebacks
            return True
        due = self._throttle.due(str(record.msg), self._clock())
        if due is None:
            return False
        if due.num_suppressed:
            record.msg = f"{record.getMessage()} ({due.num_suppressed} more in between)"
            record.args = ()
        return True
