"""Server calls: what a client sends to the server, and when the client retries. Server calls are
generators without I/O, so that threads and event loops can share the code.

A `ServerCall` is a generator. It yields objects of the classes `ServerRequest`, `Pause` and
`ThrottledWarning`. It receives the server's replies, and finally returns its result. `SwarmClient`
runs a call in the caller's thread, and `AsyncSwarmClient` runs it in an event loop.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel

from fakevllm.sdk.types import ServerUnreachable, SwarmError

Json = dict[str, Any]
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

TIMEOUT_S = 30.0
QUICK_TIMEOUT_S = 10.0
"""Timeout in seconds of requests that the server answers from memory."""
ENGINE_TIMEOUT_S = 600.0
"""Timeout in seconds of requests that start or stop the engine. A stop waits for the current
training step and its checkpoint."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
NO_VALID_KEY = (
    "This server needs a valid API key: pass it as api_key=, in FAKEVLLM_SWARM_KEY, or as "
    "http://NAME:KEY@HOST:PORT"
)
UNKNOWN_PATH = "Not Found"
NO_SWARM_SERVER = (
    "the program at this URL is no swarm server; perhaps it is a proxy, which has another port"
)
REPLY_CHARS = 300
"""Maximum number of characters of a reply that an error message quotes."""
TRANSIENT_STATUSES = (429, 502, 503, 504)
"""HTTP statuses of a server that is overloaded, or of a gateway that got no answer from the server.
A later attempt may succeed. The server may have processed the failed request nevertheless."""
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """A request to the server. A request without a body is sent as a GET. A request with a body is
    sent as a POST."""

    path: str
    body: Json | None = None
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Pause:
    """A wait of the client before its next request to the server."""

    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class ThrottledWarning:
    """A warning that may occur in many episodes, so the client logs it at a limited rate."""

    kind: str
    """Text that is the same in all repetitions of the warning."""
    text: str


@dataclass(frozen=True, slots=True)
class ServerReply:
    """The server's reply to a client's request, with any HTTP status."""

    status: int
    content: Any
    """The parsed JSON; the text if the reply is not JSON."""

    @property
    def is_object(self) -> bool:
        return isinstance(self.content, dict)

    @property
    def detail(self) -> str:
        """The error message in this reply, which the server sent for a failed request."""
        if self.status == 401:
            return NO_VALID_KEY
        match self.content:
            case {"detail": str(text)} | {"error": {"message": str(text)}}:
                return text
            case str(text):
                return f"status {self.status}, not JSON: {_quoted(text)}"
            case other:
                return f"status {self.status}: {str(other)[:REPLY_CHARS]}"


def _quoted(text: str) -> str:
    """Return the first REPLY_CHARS characters of a reply's text, as one line. For an HTML page,
    return only its title. The rest of an error page may contain an id that differs each time, so
    that equal errors would have different messages.

    >>> _quoted("<html><head><title>502 Bad Gateway</title></head>\\n<p>ray 8f2a</p></html>")
    '502 Bad Gateway'
    """
    title = _TITLE.search(text)
    return " ".join((title[1] if title else text).split())[:REPLY_CHARS]


ServerCall = Generator[ServerRequest | Pause | ThrottledWarning, ServerReply | None, T]
"""A generator that communicates with the server through a driver. When the generator yields a
ServerRequest, the driver sends the request and resumes the generator with the ServerReply. If no
server answers, the driver raises ServerUnreachable inside the generator. When the generator yields
a Pause or a ThrottledWarning, the driver waits or logs the warning, and then resumes the generator
with None."""


def normalized_server_url(text: str) -> str:
    """Return a server's URL without a trailing slash.

    Raises ValueError if `text` is not an http or https URL. Without this check, a client would
    retry a wrong URL forever.

    >>> normalized_server_url("http://gpu-box:10086/")
    'http://gpu-box:10086'
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        # The message does not quote the text, which may contain a key.
        raise ValueError("write the server's URL as http://HOST:PORT")
    return text.rstrip("/")


def send(request: ServerRequest) -> ServerCall[ServerReply]:
    """Send a request, and return the reply. The reply may have any HTTP status. Raises
    ServerUnreachable if no server answers."""
    reply = yield request
    assert reply is not None, "a driver sends a reply for each ServerRequest"
    return reply


def fetch(request: ServerRequest, model: type[M]) -> ServerCall[M]:
    """Send a request, and return the reply's JSON object, parsed as `model`. Raises SwarmError if
    the status is not 200, or if the reply is not a JSON object. Raises ServerUnreachable if no
    server answers."""
    reply = yield from send(request)
    if reply.status == 404 and reply.detail == UNKNOWN_PATH:
        raise SwarmError(f"There is no {request.path} here: {NO_SWARM_SERVER}", reply.status)
    if reply.status != 200:
        raise SwarmError(reply.detail, reply.status)
    if not reply.is_object:  # another program on this port may answer anything
        raise SwarmError(f"{request.path} was not answered by a swarm server: {reply.detail}")
    return model.model_validate(reply.content)


def fetch_with_retries(request: ServerRequest, model: type[M], backoff: Backoff) -> ServerCall[M]:
    """Send the same request until it succeeds. `backoff` has the pauses between the attempts.
    Return the parsed reply.

    Raises SwarmError after an error that a retry cannot mend. Also raises SwarmError when the time
    limit of `backoff` is reached. Use this function only for idempotent requests, because the
    server may receive the request several times.
    """
    while True:
        try:
            return (yield from fetch(request, model))
        except SwarmError as error:
            if not is_transient(error) or backoff.is_exhausted:
                raise
            yield from backoff.pause(error.detail)


def is_transient(error: SwarmError) -> bool:
    """Return True if an error of a server call is temporary, so that a later attempt of the same
    request may succeed."""
    return isinstance(error, ServerUnreachable) or error.status in TRANSIENT_STATUSES


class Backoff:
    """Exponential backoff between attempts of a request to the server: each pause is twice the
    previous pause, up to a maximum."""

    def __init__(self, limit_s: float | None, max_pause_s: float = MAX_PAUSE_S) -> None:
        """Create a backoff. `limit_s` is the maximum length of all pauses together, in seconds.
        None means no limit. `max_pause_s` is the maximum length of one pause."""
        self._left_s = limit_s
        self._max_pause_s = max_pause_s
        self._next_s = FIRST_PAUSE_S

    @property
    def is_exhausted(self) -> bool:
        return self._left_s is not None and self._left_s <= 0

    def pause(self, reason: str) -> ServerCall[None]:
        """Yield a `Pause` of the next length. The driver, which runs this server call, then waits
        for that long. `reason` says what the client waits for, and is logged if the wait is
        long."""
        seconds = self._next_s
        self._next_s = min(2 * seconds, self._max_pause_s)
        if self._left_s is not None:
            seconds = min(seconds, self._left_s)
            self._left_s -= seconds
        yield Pause(seconds, reason)
