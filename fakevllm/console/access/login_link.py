"""Decide whether a one-time login link is valid. Each link works once, for a limited time. This
module does no I/O, and gets the time as an argument."""

from __future__ import annotations

import hashlib
import secrets

LINK_LIFETIME_S = 600.0
"""Seconds for which a link logs in. Somebody who reads the terminal's history later must not get
in."""
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
        self._issued_at: dict[bytes, float] = {}
        self._last: bytes | None = None

    def issue(self, now: float) -> str:
        """Return the code of a new link."""
        code = secrets.token_urlsafe(_CODE_BYTES)
        self._end_old_codes(now)
        while len(self._issued_at) >= MAX_LINKS:
            del self._issued_at[next(iter(self._issued_at))]
        self._last = _digest(code)
        self._issued_at[self._last] = now
        return code

    def may_issue(self, now: float) -> bool:
        """Return True if a visitor may request a new link. Either the last link is old enough, or
        somebody has logged in with the last link."""
        issued_at = None if self._last is None else self._issued_at.get(self._last)
        return issued_at is None or now - issued_at >= NEW_LINK_INTERVAL_S

    def redeem(self, code: str, now: float) -> bool:
        """Return True if the code is valid. A code is valid only once. A wrong code does not
        invalidate other codes, because anybody may send a wrong code."""
        self._end_old_codes(now)
        # The key is a hash, so the time of a look-up reveals nothing about a valid code.
        return self._issued_at.pop(_digest(code), None) is not None

    def _end_old_codes(self, now: float) -> None:
        for digest, issued_at in list(self._issued_at.items()):
            if now - issued_at > LINK_LIFETIME_S:
                del self._issued_at[digest]


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "surrogateescape")).digest()
