"""A client that meets every fault: it asks one question, and says what its app gets to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

SDK_TRIES = 3
"""What the SDKs of OpenAI and Anthropic do of themselves."""
TRIES = 3
"""What the programs are set to, where they can be."""


@dataclass(frozen=True, slots=True)
class Told:
    """An answer with its end, or an error with its status where it came as one."""

    text: str = ""
    end: str | None = None
    error: str | None = None
    status: int | None = None


Ask = Callable[[str, str, Path], Told]
"""The proxy's URL, the question, and an empty folder."""


@dataclass(frozen=True, slots=True)
class Client:
    ask: Ask
    streamed: bool
    limit_s: float
    """How long it waits for the first byte, and between two."""
    most_requests: int = SDK_TRIES
    """For a fault that does not heal."""
    most_when_refused: int = 1
    """For one of 4xx."""
    is_official: bool = False
    """The own one of a format."""
    tells_status: bool = True
    is_endless: bool = False
    """It asks again for ever, more and more rarely, as long as a fault may heal."""


def failed(error: Exception) -> Told:
    """What the proxy sends must never be a broken stream, nor nothing for too long."""
    cause: BaseException | None = error
    while cause is not None:
        assert not isinstance(cause, httpx.TransportError), f"hung or broken off: {error!r}"
        cause = cause.__cause__
    return Told(error=str(error) or repr(error), status=getattr(error, "status_code", None))
