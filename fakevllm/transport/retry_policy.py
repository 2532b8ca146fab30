"""Decide whether a request is retried while the engine is unavailable, and after how many seconds.
This module does no I/O, and gets the time as an argument.

A request is first held and retried, because most outages end soon: a server restarts, or an engine
boots. If the retries fail and a fallback server is configured, the fallback server answers the
request. Without a fallback server, the app gets an error with `Retry-After`. If the server died
during a request, the request is sent again after the restart, but at most MAX_RESENDS times. The
request itself may have caused the crash.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from fakevllm_adapters.http.asgi import Headers, error_object
from fakevllm_adapters.protocol.errors import WireError, unavailable
from fakevllm_adapters.protocol.outage_reasons import OutageReason

Json = dict[str, Any]

TOO_MANY_REQUESTS = 429
OUTAGES = (502, 503, 504)
"""HTTP statuses of a temporary failure, sent by the server or by a gateway in front of the
server."""
MAX_RESENDS = 2
"""Maximum number of times that a request is sent again after the connection to a running server
broke while the server may have been processing the request. One is too few: a server that is
stopped twice within a few seconds interrupts the same request twice."""
FIRST_PAUSE_S = 0.05
"""Seconds before the first retry. Each further pause is twice as long, up to a maximum."""
MAX_PAUSE_S = 1.0
HOLD_SHARE = 0.5
"""Share of the client's read timeout for which a request may be held. The rest of the timeout is
left for the answer."""
DEFAULT_RETRY_AFTER_S = 2
MAX_RETRY_AFTER_S = 5
"""Maximum value of the `Retry-After` header that is sent to an app, in seconds. SDKs sleep for
exactly this time."""

_OLD_SERVER_MESSAGES = (
    ("The engine is not ready", OutageReason.ENGINE_NOT_READY),
    ("The engine ", OutageReason.ENGINE_FAILED),
)
"""Beginnings of the 503 messages of old swarm servers, which do not send the reason in a header.
These texts never change. Newer servers send the header, and may use any message."""
_NO_ANSWER = "The model server has no answer at the moment. Try again shortly."
_READ_TIMEOUT_HEADERS = (b"x-stainless-read-timeout", b"x-stainless-timeout")
"""Headers in which the SDKs of OpenAI and Anthropic send their read timeout, in seconds."""


@dataclass(slots=True)
class RetrySchedule:
    """The retries of one request, with exponential backoff.

    >>> schedule = RetrySchedule(limit_s=10.0, started_s=100.0)
    >>> reason = OutageReason.SERVER_UNREACHABLE
    >>> schedule.pause(reason, 100.0), schedule.pause(reason, 100.1)
    (0.05, 0.1)
    >>> schedule.pause(reason, 110.0) is None
    True
    """

    limit_s: float
    """Maximum number of seconds for which the request is held."""
    started_s: float
    """Clock time in seconds from which `limit_s` is counted: the time of the first attempt, moved
    forward by the time for which the request waited for a slot."""
    _num_retries: int = 0
    _num_resends: int = 0
    _broke_off_s: float = -math.inf
    """Clock time at which the connection broke last."""

    def pause(
        self,
        reason: OutageReason,
        now_s: float,
        *,
        may_succeed: bool = True,
        last_answered_s: float = math.inf,
    ) -> float | None:
        """Return the number of seconds to wait before the next attempt, or None to give up.
        `reason` is the reason why the last attempt failed.

        `may_succeed` is used only for the reasons ENGINE_NOT_READY and ENGINE_BUSY. If
        `may_succeed` is False, the method returns None, because waiting cannot help. Pass False in
        two cases: the engine was stopped, or the engine is busy although it samples no siblings
        (additional answers) of this proxy.

        If the connection breaks, the request is sent again, but at most MAX_RESENDS times. A break
        counts only if the server was running at some time since the previous break. Otherwise the
        request only reached a gateway, or a connection that had been open since before the previous
        break. `last_answered_s` shows whether the server was running. It is the clock time at which
        the proxy sent the latest status request that the server has answered.
        """
        left_s = self.started_s + self.limit_s - now_s
        if left_s <= 0 or reason is OutageReason.ENGINE_FAILED:
            return None
        if reason in (OutageReason.ENGINE_NOT_READY, OutageReason.ENGINE_BUSY) and not may_succeed:
            return None
        if reason is OutageReason.SERVER_BROKE_OFF:
            self._num_resends += last_answered_s > self._broke_off_s
            self._broke_off_s = now_s
            if self._num_resends > MAX_RESENDS:
                return None
        pause_s = min(FIRST_PAUSE_S * 2**self._num_retries, MAX_PAUSE_S)
        self._num_retries = min(self._num_retries + 1, 10)
        return min(pause_s, left_s)


@dataclass(slots=True)
class AbsenceTimer:
    """Timer that expires when a server has been unavailable for `limit_s` seconds.

    >>> timer = AbsenceTimer(limit_s=3.0, last_available_s=100.0)
    >>> [timer.has_expired(now_s, is_available=False) for now_s in (102.9, 103.0)]
    [False, True]
    >>> timer.has_expired(104.0, is_available=True), timer.has_expired(106.9, is_available=False)
    (False, False)
    """

    limit_s: float
    """Seconds without availability after which the timer expires."""
    last_available_s: float
    """Clock time at which the server was last available."""

    def has_expired(self, now_s: float, *, is_available: bool) -> bool:
        """Record whether the server is available at the time `now_s`. Return True if the server has
        been unavailable for at least `limit_s` seconds by then."""
        if is_available:
            self.last_available_s = now_s
        return not is_available and now_s - self.last_available_s >= self.limit_s


def max_hold_s(limit_s: float, headers: Mapping[bytes, bytes]) -> float:
    """Return the maximum number of seconds for which a request is held. This is the smaller of two
    numbers: `limit_s`, and HOLD_SHARE times the client's read timeout. The SDKs of OpenAI and
    Anthropic send their read timeout in one of the `headers`.

    >>> max_hold_s(25.0, {b"x-stainless-read-timeout": b"10"}), max_hold_s(25.0, {})
    (5.0, 25.0)
    """
    values = [headers[name] for name in _READ_TIMEOUT_HEADERS if name in headers]
    timeouts = [seconds for value in values if (seconds := _parse_seconds(value)) is not None]
    return min([limit_s, *(HOLD_SHARE * seconds for seconds in timeouts)])


def outage_reason(
    status: int, header_reason: OutageReason | None, message: str
) -> OutageReason | None:
    """Return the reason of the outage that a response reports. Return None if the response reports
    no outage and can be relayed to the app.

    `header_reason` is the reason in the response's header, or None. `message` is the error message
    in the response's body, or "". If the header is missing, the reason is derived from `status` and
    `message`, because older servers and gateways do not send the header.

    >>> outage_reason(503, OutageReason.ENGINE_NOT_READY, "Any sentence.")
    <OutageReason.ENGINE_NOT_READY: 'engine_not_ready'>
    >>> outage_reason(503, None, "Too many requests are waiting.")
    <OutageReason.ENGINE_BUSY: 'engine_busy'>
    >>> outage_reason(500, None, "") is None
    True
    """
    if status == TOO_MANY_REQUESTS:
        return OutageReason.ENGINE_BUSY
    if status not in OUTAGES:
        return None
    if header_reason is not None:
        return header_reason
    for beginning, reason in _OLD_SERVER_MESSAGES:
        if message.startswith(beginning):
            return reason
    is_busy = status == 503 and message != ""
    return OutageReason.ENGINE_BUSY if is_busy else OutageReason.ENGINE_FAILED


def outage_error(
    status: int, raw: bytes, headers: Headers, header_reason: OutageReason | None = None
) -> WireError:
    """Return the WireError for an error response of the upstream server. If the response contains
    an error message, the WireError has the response's body. Otherwise it has a general message.

    `header_reason` is the reason in the response's header, or None. The WireError's field `reason`
    is the result of `outage_reason`. It is None if the response reports no outage.
    """
    error_body = error_object(raw)
    message = None if error_body is None else _message(error_body)
    if error_body is None or message is None:
        error_body = unavailable(_NO_ANSWER).body
    after = dict(headers).get(b"retry-after", b"")
    retry_after_s = min(int(after), MAX_RETRY_AFTER_S) if after.isdigit() else DEFAULT_RETRY_AFTER_S
    reason = outage_reason(status, header_reason, message or "")
    return WireError(status, error_body, retry_after_s, reason)


def _message(body: Json) -> str | None:
    """Return the message in the body of an error response. Return None if the body has no message.
    The body may have vLLM's own error format, or the error format of vLLM's web framework."""
    error: object = body.get("error")
    message: object = cast(Json, error).get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None


def _parse_seconds(value: bytes) -> float | None:
    """Return the number of seconds in the value of a header. Return None if the value is not a
    positive number. A timeout of 0 therefore counts as missing."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if seconds > 0 else None  # False for NaN as well
