"""How long to wait before a dead engine is started again. Pure; the clock is passed in."""

from __future__ import annotations

FIRST_S = 1.0
MAX_S = 30.0
PROVEN_AFTER_S = 180.0
"""An engine that lived so long was well: its death is a new trouble, not the old one again."""


class BackOff:
    """Pauses double while engines die young.

    >>> back_off = BackOff()
    >>> [back_off.failed(now) for now in (0.0, 1.0, 2.0)]
    [1.0, 2.0, 4.0]
    """

    def __init__(self) -> None:
        self._next_s = FIRST_S
        self._up_since: float | None = None

    def booted(self, now: float) -> None:
        """Proves nothing yet: what kills it may come with the first step."""
        self._up_since = now

    def proved(self) -> None:
        """The engine did its work."""
        self._next_s = FIRST_S

    def failed(self, now: float) -> float:
        """The pause before the next start."""
        if self._up_since is not None and now - self._up_since >= PROVEN_AFTER_S:
            self.proved()
        self._up_since = None
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, MAX_S)
        return pause_s
