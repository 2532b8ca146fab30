"""What to do with a request while the model is not there: wait, and how long. Pure; the clock is
passed in.

First the request is held: servers restart, engines boot. Then another server answers it, where one
is named, or the app is told to come back. A request that may itself be the cause is not tried on
and on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from fakevllm_adapters.http.asgi import Headers, error_object
from fakevllm_adapters.protocol.errors import WireError, unavailable

Json = dict[str, Any]

NOT_READY = "The engine is not ready"
"""How the swarm server's 503 begins before its engine has come up, and after it was stopped."""
_OF_ENGINE = "The engine "
"""How all its 503s begin that are for want of an engine. One that is up and has too much to do says
so in its own words."""
TOO_MANY = 429
OUTAGES = (502, 503, 504)
"""Statuses of a server, or of a gateway before it, that heal."""
MAX_RESENT = 1
"""Times a request is sent again that may have been at work when the server went."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
SHARE_OF_PATIENCE = 0.5
"""Of the time that a client waits for an answer: the rest is for the answer."""
RETRY_S = 2
MOST_RETRY_S = 5
"""Of a `Retry-After`: SDKs sleep for it literally."""

_NO_ANSWER = "The model server has no answer at the moment. Try again shortly."
_READ_TIMEOUTS = (b"x-stainless-read-timeout", b"x-stainless-timeout")
"""OpenAI's SDKs and Anthropic's tell how long they wait."""


class Trouble(StrEnum):
    """Why there is no answer; the ledger shows it."""

    AWAY = "server_unreachable"
    """Nobody took the request."""
    NOT_READY = "engine_not_ready"
    """Refused, for the engine is not up."""
    BROKEN = "server_broke_off"
    """The server went while it had the request."""
    FAILED = "engine_failed"
    """The engine was up and has failed this request."""
    CROWDED = "engine_busy"
    """The engine is up and has too much to do."""


@dataclass(slots=True)
class Hold:
    """One request's waiting.

    >>> hold = Hold(limit_s=10.0, started_s=100.0)
    >>> hold.pause(Trouble.AWAY, 100.0), hold.pause(Trouble.AWAY, 100.1)
    (0.05, 0.1)
    >>> hold.pause(Trouble.AWAY, 110.0) is None
    True
    """

    limit_s: float
    started_s: float
    _num_tries: int = 0
    _num_resent: int = 0

    def pause(self, trouble: Trouble, now_s: float, *, is_coming: bool = True) -> float | None:
        """Seconds until the next try; None: try no more. `is_coming`: whether a server that
        refuses may yet take it: not one that was stopped, nor one that others than our siblings
        keep busy."""
        left_s = self.started_s + self.limit_s - now_s
        if left_s <= 0 or trouble is Trouble.FAILED:
            return None
        if trouble in (Trouble.NOT_READY, Trouble.CROWDED) and not is_coming:
            return None
        if trouble is Trouble.BROKEN:
            self._num_resent += 1
            if self._num_resent > MAX_RESENT:
                return None
        pause_s = min(FIRST_PAUSE_S * 2**self._num_tries, LONGEST_PAUSE_S)
        self._num_tries = min(self._num_tries + 1, 10)
        return min(pause_s, left_s)


@dataclass(slots=True)
class Absence:
    """How long something has been away at a stretch, as far as anybody looked.

    >>> away = Absence(limit_s=3.0, there_s=100.0)
    >>> [away.is_too_long(now_s, is_there=False) for now_s in (102.9, 103.0)]
    [False, True]
    >>> away.is_too_long(104.0, is_there=True), away.is_too_long(106.9, is_there=False)
    (False, False)
    """

    limit_s: float
    there_s: float
    """When it was there last."""

    def is_too_long(self, now_s: float, *, is_there: bool) -> bool:
        if is_there:
            self.there_s = now_s
        return not is_there and now_s - self.there_s >= self.limit_s


def hold_s(limit_s: float, headers: Mapping[bytes, bytes]) -> float:
    """How long a request may be held, by its client's own limit too.

    >>> hold_s(25.0, {b"x-stainless-read-timeout": b"10"}), hold_s(25.0, {})
    (5.0, 25.0)
    """
    told = [headers[name] for name in _READ_TIMEOUTS if name in headers]
    waits = [seconds for value in told if (seconds := _seconds(value)) is not None]
    return min([limit_s, *(SHARE_OF_PATIENCE * seconds for seconds in waits)])


def trouble_of_status(status: int, message: str) -> Trouble | None:
    """
    >>> trouble_of_status(503, "The engine is not ready: ENGINE.BOOTING.")
    <Trouble.NOT_READY: 'engine_not_ready'>
    >>> trouble_of_status(503, "Too many requests are waiting.")
    <Trouble.CROWDED: 'engine_busy'>
    >>> trouble_of_status(500, "") is None
    True
    """
    if status == TOO_MANY:
        return Trouble.CROWDED
    if status not in OUTAGES:
        return None
    if message.startswith(NOT_READY):
        return Trouble.NOT_READY
    is_lost = status != 503 or message in ("", _NO_ANSWER) or message.startswith(_OF_ENGINE)
    return Trouble.FAILED if is_lost else Trouble.CROWDED


def outage_of(status: int, raw: bytes, headers: Headers) -> WireError:
    """A server's answer of one of OUTAGES, or TOO_MANY, in its own words as far as it has any."""
    found = error_object(raw)
    told = found if found is not None and _says(found) else unavailable(_NO_ANSWER).body
    after = dict(headers).get(b"retry-after", b"")
    return WireError(status, told, min(int(after), MOST_RETRY_S) if after.isdigit() else RETRY_S)


def _says(body: Json) -> bool:
    """Whether an error's body holds a message, in vLLM's shape or as its web layer writes it."""
    error: object = body.get("error")
    message: object = cast(Json, error).get("message") if isinstance(error, dict) else error
    return isinstance(message, str)


def _seconds(value: bytes) -> float | None:
    """None for what is no number of seconds: such a client waits as it likes."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if seconds > 0 else None  # not nan either
