"""What is said to all who look at the state: short, and soon forgotten. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

KEPT_S = 30.0
MOST = 50
MAX_CHARS = 4000
"""Of one message."""


@dataclass(frozen=True, slots=True)
class VerboseEntry:
    timestamp: float
    """Unix seconds."""
    tag: str
    message: str


class VerboseLog:
    def __init__(self) -> None:
        self._entries: deque[VerboseEntry] = deque(maxlen=MOST)

    def push(self, tag: str, message: str, now: float) -> None:
        self._entries.append(VerboseEntry(now, tag, message))

    def entries(self, now: float) -> list[VerboseEntry]:
        """Oldest first."""
        return [entry for entry in self._entries if now - entry.timestamp <= KEPT_S]
