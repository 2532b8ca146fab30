"""Short messages that clients send to each other. Every client can read a message for a few
seconds. The messages are kept in memory only."""

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
    """One message that a client sent."""

    timestamp: float
    """Time at which the message arrived, in Unix seconds."""
    tag: str
    message: str


class VerboseLog:
    """The latest messages that clients have sent to each other. They are kept in memory."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, VerboseEntry]] = deque(maxlen=MAX_ENTRIES)
        """Each message with the time of its push on the caller's monotonic clock."""

    def push(self, tag: str, message: str, *, now: float, unix_now: float) -> None:
        """Add a message. `now` is the time in seconds on a monotonic clock, and decides when the
        message expires. `unix_now` is the Unix time that readers of the message see."""
        self._entries.append((now, VerboseEntry(unix_now, tag, message)))

    def entries(self, now: float) -> list[VerboseEntry]:
        """Return the messages of the last RETENTION_S seconds, oldest first. `now` is the time on a
        monotonic clock in seconds."""
        return [entry for at, entry in self._entries if now - at <= RETENTION_S]
