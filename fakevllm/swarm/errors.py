"""What went wrong on the line to the swarm server: whether it passes, and what to do."""

from __future__ import annotations

import os

import aiohttp

CALL_TIMEOUT_S = 10
NEEDS_ADMIN_KEY = (
    "our key may not start the engine: have an admin start it, or give an admin's key with "
    "--swarm-key and start this again"
)
NETWORK_ERRORS = (aiohttp.ClientError, TimeoutError, OSError)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later: what the server refuses (4xx) it refuses again.

    >>> is_transient(TimeoutError()), is_transient(ValueError())
    (True, False)
    """
    is_refusal = isinstance(error, aiohttp.ClientResponseError) and 400 <= error.status < 500
    return isinstance(error, NETWORK_ERRORS) and not is_refusal


def describe_error(error: Exception) -> str:
    """What is wrong with the server and what to do, in one line; the sentence begins with its URL.

    >>> describe_error(TimeoutError())
    'does not answer within 10 s: see its log'
    """
    match error:
        case aiohttp.ClientResponseError(status=401):
            return "refuses our key (401): give the one it knows with --swarm-key"
        case aiohttp.ClientResponseError():
            said = f"{error.status} {error.message}".strip()
            return f"answers {one_line(said)}: see its log, or name a fakevllm-server with --swarm"
        case TimeoutError():
            return f"does not answer within {CALL_TIMEOUT_S} s: see its log"
        case aiohttp.ClientError():
            return (
                f"cannot be reached ({_cause(error)}): start it with `fakevllm-server start`, or "
                "name another with --swarm"
            )
        case _:
            return f"cannot be followed ({type(error).__name__}: {one_line(str(error))})"


def _cause(error: aiohttp.ClientError) -> str:
    """Without aiohttp's key of the connection."""
    errno = error.errno if isinstance(error, OSError) else None
    if errno is not None and errno > 0:
        return os.strerror(errno)
    said = error.strerror if isinstance(error, OSError) else str(error)
    return one_line(said or type(error).__name__)


def one_line(text: str) -> str:
    return " ".join(text.split())[:300]
