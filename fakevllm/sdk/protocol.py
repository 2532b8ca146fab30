"""How a client talks, without any I/O.

A talk is a generator: it yields a request or a pause, is sent what came of it, and returns its
result. `SwarmClient` carries talks out in the caller's thread, `AsyncSwarmClient` in an event loop;
what is said, and when it is said again, stands here once for both.
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
"""Of questions that the server answers from memory."""
ENGINE_TIMEOUT_S = 600.0
"""Of a stop, which waits for the step in hand and its checkpoint."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
KEYLESS = (
    "This server asks for a good key: give one as api_key=, in FAKEVLLM_SWARM_KEY, or as "
    "http://NAME:KEY@HOST:PORT"
)
UNKNOWN_PATH = "Not Found"
NO_SWARM_SERVER = (
    "what answers is no swarm server, but perhaps a proxy, which has a port of its own"
)
REPLY_CHARS = 300
"""Of a reply that is not JSON, as an error quotes it."""
PASSING = (429, 502, 503, 504)
"""Of a server that cannot take it now, or a gateway that got no answer from it. What was asked may
have been done."""
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Without a body it is a GET."""

    path: str
    body: Json | None = None
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class Remark:
    """What a client says once in a while, though it comes with each of its episodes."""

    about: str
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content: Any
    """The JSON it held; text where it held none."""

    @property
    def is_object(self) -> bool:
        return isinstance(self.content, dict)

    @property
    def detail(self) -> str:
        """What an error says."""
        if self.status == 401:
            return KEYLESS
        match self.content:
            case {"detail": str(text)} | {"error": {"message": str(text)}}:
                return text
            case str(text):
                return f"status {self.status}, not JSON: {_quoted(text)}"
            case other:
                return f"status {self.status}: {str(other)[:REPLY_CHARS]}"


def _quoted(text: str) -> str:
    """In one line; of a page its title, which is the same each time it comes.

    >>> _quoted("<html><head><title>502 Bad Gateway</title></head>\\n<p>ray 8f2a</p></html>")
    '502 Bad Gateway'
    """
    title = _TITLE.search(text)
    return " ".join((title[1] if title else text).split())[:REPLY_CHARS]


Talk = Generator[Ask | Pause | Remark, Answer | None, T]
"""A driver throws ServerUnreachable into it where an Ask got no answer."""


def server_url(text: str) -> str:
    """Without a slash at its end. Raises ValueError for what is no http address, which a client
    would try again and again.

    >>> server_url("http://gpu-box:10086/")
    'http://gpu-box:10086'
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("write the server's URL as http://HOST:PORT")  # a key may be in it
    return text.rstrip("/")


def answered(ask: Ask) -> Talk[Answer]:
    """Raises ServerUnreachable."""
    answer = yield ask
    assert answer is not None, "a driver sends an answer for each Ask"
    return answer


def asked(ask: Ask, reply: type[M]) -> Talk[M]:
    """Raises SwarmError for anything but the reply."""
    answer = yield from answered(ask)
    if answer.status == 404 and answer.detail == UNKNOWN_PATH:
        raise SwarmError(f"There is no {ask.path} here: {NO_SWARM_SERVER}", answer.status)
    if answer.status != 200:
        raise SwarmError(answer.detail, answer.status)
    if not answer.is_object:  # a stranger on the port may say anything
        raise SwarmError(f"{ask.path} was not answered by a swarm server: {answer.detail}")
    return reply.model_validate(answer.content)


def insisted(ask: Ask, reply: type[M], patience: Patience) -> Talk[M]:
    """The same request again while what keeps it from being answered may pass. For requests that a
    server acts on once, however often they come."""
    while True:
        try:
            return (yield from asked(ask, reply))
        except SwarmError as error:
            if not is_passing(error) or patience.is_over:
                raise
            yield from patience.pause(error.detail)


def is_passing(error: SwarmError) -> bool:
    return isinstance(error, ServerUnreachable) or error.status in PASSING


class Patience:
    """Pauses between tries, each longer than the one before, and how long they may be in all."""

    def __init__(self, limit_s: float | None, longest_s: float = LONGEST_PAUSE_S) -> None:
        """None is for ever."""
        self._left_s = limit_s
        self._longest_s = longest_s
        self._next_s = FIRST_PAUSE_S

    @property
    def is_over(self) -> bool:
        return self._left_s is not None and self._left_s <= 0

    def pause(self, why: str) -> Talk[None]:
        seconds = self._next_s
        self._next_s = min(2 * seconds, self._longest_s)
        if self._left_s is not None:
            seconds = min(seconds, self._left_s)
            self._left_s -= seconds
        yield Pause(seconds, why)
