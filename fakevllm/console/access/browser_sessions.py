"""Decide which cookie is a login, and which token a form must have. This module does no I/O, and
gets the time as an argument.

A form token (CSRF token) is made from the cookie and a secret of this process. A page of another
site can make a browser send the cookie, but cannot read the token.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

LIFETIME_S = 24 * 3600.0
"""Seconds after which a login ends."""
MAX_SESSIONS = 256
"""Maximum number of logins. A further login ends the oldest one."""
_ID_BYTES = 32


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """A login of one browser."""

    ends_at: float
    key_fingerprint: str | None = None
    """Fingerprint of the API key that logged in. None if a one-time link logged in."""


class BrowserSessions:
    """The logins of all browsers. They are lost when the process ends.

    >>> sessions = BrowserSessions()
    >>> cookie = sessions.open(now=0.0)
    >>> sessions.find(cookie, now=1.0) is None, sessions.find("other", now=1.0) is None
    (False, True)
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(_ID_BYTES)
        # The key is a hash, so the time of a look-up reveals nothing about a valid cookie.
        self._sessions: dict[bytes, BrowserSession] = {}

    def open(self, now: float, key_fingerprint: str | None = None) -> str:
        """Begin a login, and return the value of its cookie."""
        ended = [key for key, session in self._sessions.items() if session.ends_at <= now]
        for key in ended:
            del self._sessions[key]
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        cookie = secrets.token_urlsafe(_ID_BYTES)
        self._sessions[_digest(cookie)] = BrowserSession(now + LIFETIME_S, key_fingerprint)
        return cookie

    def find(self, cookie: str | None, now: float) -> BrowserSession | None:
        """Return the login with this cookie, or None if there is none or it has ended."""
        session = self._sessions.get(_digest(cookie or ""))
        return session if session is not None and now < session.ends_at else None

    def close(self, cookie: str | None) -> None:
        """End the login with this cookie, if there is one."""
        self._sessions.pop(_digest(cookie or ""), None)

    def form_token(self, cookie: str) -> str:
        """Return the token that a form must have if the browser has this cookie. The cookie need
        not be a login, because the login page has forms too."""
        return hmac.new(self._secret, _bytes(cookie), hashlib.sha256).hexdigest()

    def accepts_form(self, cookie: str | None, token: str) -> bool:
        """Return True if `token` is the form token (CSRF token) of this cookie."""
        if not cookie:
            return False
        return hmac.compare_digest(_bytes(self.form_token(cookie)), _bytes(token))


def new_cookie() -> str:
    """Return the value of a cookie for a browser that has not logged in yet."""
    return secrets.token_urlsafe(_ID_BYTES)


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(_bytes(cookie)).digest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
