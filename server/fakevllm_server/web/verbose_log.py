"""Short messages that clients push and that every client may read for a few seconds. They are kept
in memory only."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

RETENTION_S = 30.0
"""Seconds after which a message is no longer returned."""
MAX_ENTRIES = 50
"""Maximum number of messages kept. The oldest is removed first."""
MAX_CHARS = 4000
"""Maximum length of one message in characters."""


@dataclass(frozen=True, slots=True)
class VerboseEntry:
    """One message that a client pushed."""

    timestamp: float
    """Time of the push in Unix seconds."""
    tag: str
    message: str


class VerboseLog:
    """The latest log messages that clients have sent. They are kept in memory."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, VerboseEntry]] = deque(maxlen=MAX_ENTRIES)
        """Each message with the time of its push on the caller's monotonic clock."""

    def push(self, tag: str, message: str, *, now: float, unix_now: float) -> None:
        """Add a message. `now` is the time on a monotonic clock in seconds, and `unix_now` is the
        time in Unix seconds, which readers are shown."""
        self._entries.append((now, VerboseEntry(unix_now, tag, message)))

    def entries(self, now: float) -> list[VerboseEntry]:
        """Return the messages of the last RETENTION_S seconds, oldest first. `now` is the time on
        the monotonic clock."""
        return [entry for at, entry in self._entries if now - at <= RETENTION_S]
