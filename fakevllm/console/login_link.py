"""Decide which one-time link logs in: the newest one, once, for a limited time. The class does no
I/O, and gets the time as an argument."""

from __future__ import annotations

import hashlib
import hmac
import secrets

LINK_LIFETIME_S = 600.0
"""Seconds for which a link logs in. Somebody who reads the terminal's history later must not get
in."""
NEW_LINK_INTERVAL_S = 10.0
"""Minimum seconds between two links. Anybody who reaches the login page may request one, and must
not be able to fill the terminal."""
_CODE_BYTES = 24


class LoginLink:
    """The code of the link that logs in. There is at most one valid code.

    >>> link = LoginLink()
    >>> code = link.issue(now=0.0)
    >>> link.redeem(code, now=1.0), link.redeem(code, now=2.0)
    (True, False)
    """

    def __init__(self) -> None:
        self._digest: bytes | None = None
        self._issued_at = 0.0

    def issue(self, now: float) -> str:
        """Return the code of a new link. Earlier codes no longer log in."""
        code = secrets.token_urlsafe(_CODE_BYTES)
        self._digest, self._issued_at = _digest(code), now
        return code

    def may_issue(self, now: float) -> bool:
        """Return True if the last link is old enough, so that a visitor may request a new one."""
        return now - self._issued_at >= NEW_LINK_INTERVAL_S

    def redeem(self, code: str, now: float) -> bool:
        """Return True if the code logs in. It does not log in a second time. A wrong code does not
        end the valid one, because anybody may send a wrong code."""
        is_open = self._digest is not None and now - self._issued_at <= LINK_LIFETIME_S
        if not is_open or not hmac.compare_digest(self._digest or b"", _digest(code)):
            return False
        self._digest = None
        return True


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "surrogateescape")).digest()
