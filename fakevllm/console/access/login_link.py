"""Decide whether a one-time login link is valid. Each link works once, for a limited time. This
module does no I/O, and gets the time as an argument."""

from __future__ import annotations

import hashlib
import secrets

LINK_LIFETIME_S = 600.0
"""Seconds for which a link logs in. Somebody who reads the terminal's history later must not get
in. For the first link, the seconds count from the time at which the proxy is ready."""
NEW_LINK_INTERVAL_S = 10.0
"""Minimum seconds between two links. Anybody who reaches the login page may request one, and must
not be able to fill the terminal."""
MAX_LINKS = 64
"""Maximum number of links that log in. Visitors cannot request as many in LINK_LIFETIME_S, so they
cannot end a link that somebody else is about to open."""
_CODE_BYTES = 24


class LoginLink:
    """The codes of the one-time login links. At most MAX_LINKS links are valid at a time.

    >>> link = LoginLink()
    >>> code = link.issue(now=0.0)
    >>> link.redeem(code, now=1.0), link.redeem(code, now=2.0)
    (True, False)
    """

    def __init__(self) -> None:
        self._ends_at: dict[bytes, float] = {}
        """The time at which each code ends, oldest code first."""
        self._first: bytes | None = None
        self._last: bytes | None = None
        self._last_issued_at = 0.0

    def issue(self, now: float) -> str:
        """Return the code of a new link."""
        code = secrets.token_urlsafe(_CODE_BYTES)
        self._end_old_codes(now)
        while len(self._ends_at) >= MAX_LINKS:
            del self._ends_at[next(iter(self._ends_at))]
        self._last, self._last_issued_at = _digest(code), now
        self._first = self._first or self._last
        self._ends_at[self._last] = now + LINK_LIFETIME_S
        return code

    def prolong_first(self, now: float) -> None:
        """Let the lifetime of the first link start again, unless the link was used or has ended.
        Other links are not prolonged: any visitor may request them, and they would add up."""
        self._end_old_codes(now)
        if self._first in self._ends_at:
            self._ends_at[self._first] = now + LINK_LIFETIME_S

    def may_issue(self, now: float) -> bool:
        """Return True if a visitor may request a new link. Either the last link is old enough, or
        somebody has logged in with the last link."""
        is_waiting = self._last in self._ends_at
        return not is_waiting or now - self._last_issued_at >= NEW_LINK_INTERVAL_S

    def redeem(self, code: str, now: float) -> bool:
        """Return True if the code is valid. A code is valid only once. A wrong code does not
        invalidate other codes, because anybody may send a wrong code."""
        self._end_old_codes(now)
        # The key is a hash, so the time of a look-up reveals nothing about a valid code.
        return self._ends_at.pop(_digest(code), None) is not None

    def _end_old_codes(self, now: float) -> None:
        for digest, ends_at in list(self._ends_at.items()):
            if now > ends_at:
                del self._ends_at[digest]


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "surrogateescape")).digest()
