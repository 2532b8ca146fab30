"""Text of the error that ended a request to another program. The module imports no aiohttp, so that
status commands start fast."""

from __future__ import annotations

import os
import ssl

MAX_LINE_CHARS = 300


def error_cause(error: object) -> str:
    """Return the text of an error in one line, without the host and the TLS settings that aiohttp
    adds to it. `error` is an exception or a text.

    >>> error_cause(ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 8000)"))
    'Connection refused'
    >>> error_cause(TimeoutError("timed out")), error_cause(TimeoutError()), error_cause("a  b")
    ('timed out', 'TimeoutError', 'a b')
    """
    return one_line(_text(error) or str(error) or type(error).__name__)


def _text(error: object) -> str | None:
    """Return the text without the error's arguments. Return None if the error has no such text."""
    if not isinstance(error, OSError):
        return None
    # The number of a TLS error is OpenSSL's, and those of name lookups are negative. As a number of
    # the system, each of them has another meaning.
    is_of_system = not isinstance(error, ssl.SSLError) and (error.errno or 0) > 0
    return os.strerror(error.errno or 0) if is_of_system else error.strerror


def one_line(text: str) -> str:
    """Return the text as one line of at most MAX_LINE_CHARS characters. Each run of white space
    becomes a single space."""
    return " ".join(text.split())[:MAX_LINE_CHARS]
