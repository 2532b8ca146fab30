"""The interface of a client in the fault tests: it sends one question and reports the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

SDK_ATTEMPTS = 3
"""Attempts that the SDKs of OpenAI and Anthropic make by default."""
ATTEMPTS = 3
"""Attempts that the programs are configured to make, if they can be configured."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome that an app sees: an answer with its finish reason, or an error.

    `status` is set if the error was an HTTP status.
    """

    text: str = ""
    end: str | None = None
    error: str | None = None
    status: int | None = None


SendQuestion = Callable[[str, str, Path], Outcome]
"""A function of the proxy's URL, the question, and an empty folder."""


@dataclass(frozen=True, slots=True)
class Client:
    send: SendQuestion
    streamed: bool
    limit_s: float
    """Seconds that the client waits for the first byte, and between two bytes."""
    max_requests: int = SDK_ATTEMPTS
    """Maximum number of requests if the fault persists."""
    max_when_refused: int = 1
    """Maximum number of requests after a status of 4xx."""
    is_official: bool = False
    """Whether this is the client of the company that defined the format."""
    reports_status: bool = True
    retries_forever: bool = False
    """Whether the client retries without end, with growing pauses."""


def outcome_of(error: Exception) -> Outcome:
    """Return the outcome of an exception, and fail if it is a timeout or a broken stream."""
    cause: BaseException | None = error
    while cause is not None:
        assert not isinstance(cause, httpx.TransportError), f"timeout or broken stream: {error!r}"
        cause = cause.__cause__
    return Outcome(error=str(error) or repr(error), status=getattr(error, "status_code", None))
