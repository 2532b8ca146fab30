"""What to do with a request while the model is not there: wait, and how long. Pure; the clock is
passed in.

First the request is held: servers restart, engines boot. Then another server answers it, where one
is named, or the app is told to come back. A request that may itself be the cause is not tried on
and on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from fakevllm_adapters.http.asgi import Headers, error_object
from fakevllm_adapters.protocol.errors import WireError, unavailable
from fakevllm_adapters.protocol.reasons import OutageReason

Json = dict[str, Any]

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

_SENTENCES_OF_OLD_SERVERS = (
    ("The engine is not ready", OutageReason.ENGINE_NOT_READY),
    ("The engine ", OutageReason.ENGINE_FAILED),
)
"""How the 503s begin of swarm servers that do not send the reason header. The sentences are those
of the last such server and never change; today's servers may word theirs as they like."""
_NO_ANSWER = "The model server has no answer at the moment. Try again shortly."
_READ_TIMEOUTS = (b"x-stainless-read-timeout", b"x-stainless-timeout")
"""OpenAI's SDKs and Anthropic's tell how long they wait."""


@dataclass(slots=True)
class RetrySchedule:
    """One request's waiting.

    >>> hold = RetrySchedule(limit_s=10.0, started_s=100.0)
    >>> reason = OutageReason.SERVER_UNREACHABLE
    >>> hold.pause(reason, 100.0), hold.pause(reason, 100.1)
    (0.05, 0.1)
    >>> hold.pause(reason, 110.0) is None
    True
    """

    limit_s: float
    started_s: float
    _num_tries: int = 0
    _num_resent: int = 0

    def pause(
        self, reason: OutageReason, now_s: float, *, may_succeed: bool = True
    ) -> float | None:
        """Seconds until the next try; None: try no more. `may_succeed`: whether a server that
        refuses may yet take it: not one that was stopped, nor one that others than our siblings
        keep busy."""
        left_s = self.started_s + self.limit_s - now_s
        if left_s <= 0 or reason is OutageReason.ENGINE_FAILED:
            return None
        if reason in (OutageReason.ENGINE_NOT_READY, OutageReason.ENGINE_BUSY) and not may_succeed:
            return None
        if reason is OutageReason.SERVER_BROKE_OFF:
            self._num_resent += 1
            if self._num_resent > MAX_RESENT:
                return None
        pause_s = min(FIRST_PAUSE_S * 2**self._num_tries, LONGEST_PAUSE_S)
        self._num_tries = min(self._num_tries + 1, 10)
        return min(pause_s, left_s)


@dataclass(slots=True)
class AbsenceTimer:
    """How long something has been away at a stretch, as far as anybody looked.

    >>> away = AbsenceTimer(limit_s=3.0, there_s=100.0)
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


def max_hold_s(limit_s: float, headers: Mapping[bytes, bytes]) -> float:
    """How long a request may be held, by its client's own limit too.

    >>> max_hold_s(25.0, {b"x-stainless-read-timeout": b"10"}), max_hold_s(25.0, {})
    (5.0, 25.0)
    """
    told = [headers[name] for name in _READ_TIMEOUTS if name in headers]
    waits = [seconds for value in told if (seconds := _seconds(value)) is not None]
    return min([limit_s, *(SHARE_OF_PATIENCE * seconds for seconds in waits)])


def outage_reason(status: int, sent: OutageReason | None, message: str) -> OutageReason | None:
    """Return why a response of this status has no answer, None for an error that is an answer.

    `sent` is the reason in the response's header. `message`, "" where the body has none, counts
    only where no reason was sent: by a server of an older version or by a gateway before it.

    >>> outage_reason(503, OutageReason.ENGINE_NOT_READY, "Any sentence.")
    <OutageReason.ENGINE_NOT_READY: 'engine_not_ready'>
    >>> outage_reason(503, None, "Too many requests are waiting.")
    <OutageReason.ENGINE_BUSY: 'engine_busy'>
    >>> outage_reason(500, None, "") is None
    True
    """
    if status == TOO_MANY:
        return OutageReason.ENGINE_BUSY
    if status not in OUTAGES:
        return None
    if sent is not None:
        return sent
    for opening, reason in _SENTENCES_OF_OLD_SERVERS:
        if message.startswith(opening):
            return reason
    is_busy = status == 503 and message != ""
    return OutageReason.ENGINE_BUSY if is_busy else OutageReason.ENGINE_FAILED


def outage_error(
    status: int, raw: bytes, headers: Headers, sent: OutageReason | None = None
) -> WireError:
    """Return the error of an upstream response, with its body where that holds a message.

    `sent` is the reason in the response's header. The error's reason is None where `outage_reason`
    takes the response for an answer.
    """
    found = error_object(raw)
    message = None if found is None else _message(found)
    body = unavailable(_NO_ANSWER).body if found is None or message is None else found
    after = dict(headers).get(b"retry-after", b"")
    retry_after_s = min(int(after), MOST_RETRY_S) if after.isdigit() else RETRY_S
    return WireError(status, body, retry_after_s, outage_reason(status, sent, message or ""))


def _message(body: Json) -> str | None:
    """Return the message of an error's body, in vLLM's shape or as its web layer writes it."""
    error: object = body.get("error")
    message: object = cast(Json, error).get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None


def _seconds(value: bytes) -> float | None:
    """None for what is no number of seconds: such a client waits as it likes."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if seconds > 0 else None  # not nan either
