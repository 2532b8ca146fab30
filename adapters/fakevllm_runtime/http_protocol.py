"""Limits on slow and endless requests, for uvicorn's httptools protocol class.

The head of a request is its request line and its headers. Uvicorn stores the headers until the last
one has arrived, but the last one may never arrive. No API key is checked before the whole head has
arrived.

`limited_protocol` returns a subclass of uvicorn's protocol class. The subclass has these limits:

* A limit on the size of a head.
* A limit on the time in which the head must arrive, and a limit on the time in which the body must
  arrive (see `ArrivalLimits`).
* A limit on the number of connections whose head is unfinished. Beyond this limit, the oldest of
  these connections is closed.
* A limit on the number of all connections, so that file descriptors remain for databases and for
  calls to the engine. Beyond this limit, the connection that has been idle longest is closed. If no
  connection is idle, the oldest connection with an unfinished head is closed. If there is no such
  connection either, the new connection gets a 503.

Nearly all requests arrive in one read of the socket. No timer is started for such a request.

The subclass also mends two faults of uvicorn's protocol class that let a client hide a request or a
header from a load balancer:

* An offer to switch to another protocol, such as `Upgrade: h2c`, is ignored, and the request is
  served over HTTP/1.1. Uvicorn would drop the body of the request, and read the bytes of this body
  as the next request.
* Trailers, which are headers after a chunked body, are ignored. Uvicorn would add them to the
  headers of the request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fakevllm_adapters.protocol.errors import error_body
from fakevllm_runtime.log_throttle import LogThrottle

log = logging.getLogger("fakevllm.http")

MAX_HEAD_BYTES = 2**19
"""Maximum size of a request head. The access guard, which checks requests after they were parsed,
has a lower limit on headers. A head just above the guard's limit therefore gets the guard's more
helpful error message. MAX_HEAD_BYTES is also larger than the data of one read of a socket."""
PER_PART_BYTES = 32
"""Number of bytes that is added to the size of each header for its overhead, as in HTTP/2."""
MIN_AGE_S = 5.0
"""For this many seconds, a connection with an unfinished head is never closed to make room for
others. When many clients connect at once, the server needs some time to read their heads."""
LOG_INTERVAL_S = 60.0
"""Minimum number of seconds between two log lines about connections that were closed for the same
reason."""

P = TypeVar("P", bound=type[Any])

ON_CONNECTION_LOST = "fakevllm.on_lost"
"""Key of a request's `scope["state"]` under which an app can store a callback. When the connection
is lost, the callback of the latest request on this connection is called. Its argument is the
connection's error, or None if there was no error."""


@dataclass(frozen=True, slots=True)
class ArrivalLimits:
    """Limits on the time in which the head and the body of a request must arrive, and on the number
    of connections.

    The head and the body each have `base_s` seconds to arrive, and one more second for every
    `min_rate` bytes that have arrived. The default times are those of Apache's mod_reqtimeout.
    """

    base_s: float = 20.0
    min_rate: float = 500.0
    """Lowest rate of arrival, in bytes per second."""
    num_unfinished_heads: int = 512
    num_connections: int = 10_000

    def deadline(self, started_at: float, num_bytes: int) -> float:
        """Return the time by which the rest of a head or body must arrive.

        `num_bytes` bytes have arrived since the time `started_at`. Times are in seconds.

        >>> ArrivalLimits().deadline(100.0, 0), ArrivalLimits().deadline(100.0, 5000)
        (120.0, 130.0)
        """
        return started_at + self.base_s + num_bytes / self.min_rate


@dataclass(slots=True)
class Connections:
    """Data that all connections of a server share. The data are the limits, and lists of the
    connections that may be closed to make room for new ones."""

    limits: ArrivalLimits
    unfinished: dict[LimitedProtocol, None] = field(default_factory=dict["LimitedProtocol", None])
    """Connections whose request head is unfinished, the oldest first."""
    idle: dict[LimitedProtocol, None] = field(default_factory=dict["LimitedProtocol", None])
    """Connections that wait for their next request, the one that has been idle longest first."""
    throttle: LogThrottle = field(default_factory=lambda: LogThrottle(LOG_INTERVAL_S))

    def log_closed(self, reason: str, now: float) -> None:
        """Log that a connection was closed. For each reason, at most one line per LOG_INTERVAL_S
        seconds is logged."""
        due = self.throttle.due(reason, now)
        if due is not None:
            log.warning("closed %d connection(s): %s", 1 + due.num_suppressed, reason)


def limited_protocol(protocol: P, limits: ArrivalLimits | None = None) -> P:
    """Return a subclass of uvicorn's protocol class `protocol` that limits slow and endless
    requests.

    If `protocol` is not based on httptools, return `protocol` unchanged.
    """
    if not hasattr(protocol, "on_header"):
        return protocol
    shared = Connections(limits or ArrivalLimits())
    return cast(P, type("LimitedHttp", (LimitedProtocol, protocol), {"shared": shared}))


if TYPE_CHECKING:

    class _HttpTools:
        """The attributes and methods of uvicorn's httptools protocol class that LimitedProtocol
        uses. This class exists for type checkers only."""

        transport: Any
        scope: Any
        flow: Any
        cycle: Any
        pipeline: Any
        parser: Any
        url: bytes
        headers: list[tuple[bytes, bytes]]
        timeout_keep_alive: float
        timeout_keep_alive_task: asyncio.TimerHandle | None
        connections: set[Any]
        loop: asyncio.AbstractEventLoop

        def connection_made(self, transport: Any) -> None: ...
        def connection_lost(self, exc: Exception | None) -> None: ...
        def data_received(self, data: bytes) -> None: ...
        def __init__(self, *arguments: Any, **named: Any) -> None: ...
        def send_400_response(self, msg: str) -> None: ...
        def on_message_begin(self) -> None: ...
        def on_url(self, url: bytes) -> None: ...
        def on_header(self, name: bytes, value: bytes) -> None: ...
        def on_headers_complete(self) -> None: ...
        def on_body(self, body: bytes) -> None: ...
        def on_message_complete(self) -> None: ...
        def on_response_complete(self) -> None: ...
        def timeout_keep_alive_handler(self) -> None: ...
else:
    _HttpTools = object


class LimitedProtocol(_HttpTools):
    """A mixin that adds limits on slow and endless requests to uvicorn's protocol class.

    In the list of base classes, the mixin must stand before uvicorn's protocol class.

    If the head of a request is too long, the client gets a 400 and the connection is closed.
    Uvicorn handles malformed HTTP in the same way. A request that arrives too slowly gets a 408.
    """

    shared: Connections

    _head_bytes = 0
    """Size of the current request's URL, headers and trailers."""
    _unseen_bytes = 0
    """Bytes received since the parser last called a method of this class. The number grows while an
    endless header arrives."""
    _awaits_head = True
    """Whether the next byte belongs to a head. The value is True at the beginning of the
    connection, inside a head, and between two requests."""
    _is_idle = False
    """Whether the last request has arrived completely. Uvicorn's keep-alive timeout then
    applies."""
    _part_started_at = 0.0
    """Time at which the current head or body began, on the event loop's clock."""
    _part_bytes = 0
    """Number of bytes of the current head or body that have arrived."""
    _timer: asyncio.TimerHandle | None = None
    _data = b""
    """The bytes that the parser is reading now."""
    _again = b""
    """Bytes that the parser must read again, after an offer to switch the protocol was removed from
    them."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        now = self.loop.time()
        is_full = len(self.connections) > self.shared.limits.num_connections
        if is_full and not self._make_room(now):
            self.shared.log_closed("the limit on open connections is reached", now)
            return self._refuse(503, "Too many connections are open. Try again shortly.")
        self._start_part()
        self._watch()

    def data_received(self, data: bytes) -> None:
        self._unseen_bytes += len(data)
        self._part_bytes += len(data)
        self.shared.idle.pop(self, None)
        if self._is_idle:
            self._is_idle = False
            self._start_part(len(data))
        self._data = data
        super().data_received(data)
        while self._again and not self.transport.is_closing():
            self._data, self._again = self._again, b""
            super().data_received(self._data)
        self._data = b""
        if self._unseen_bytes > MAX_HEAD_BYTES:
            self.send_400_response("Invalid HTTP request received.")
        if self._is_idle:
            self._unwatch()
            self._await_next_request()
        elif self._timer is None and not self.transport.is_closing():
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self.shared.idle.pop(self, None)
        super().connection_lost(exc)
        callback = self.scope["state"].get(ON_CONNECTION_LOST) if self.scope else None
        if callback is not None:
            callback(exc)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._awaits_head, self._is_idle = True, False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if self._awaits_head:  # uvicorn would add trailers to headers that were checked before
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._awaits_head = False
        self.shared.unfinished.pop(self, None)
        self._start_part()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unseen_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser could not read, and close the connection. The response
        is a 503 and not a 400 if the parser failed for lack of memory.

        Uvicorn calls this method while it handles the parser's exception. If memory was lacking,
        the context of this exception is a MemoryError.
        """
        if self.transport.is_closing():
            return
        error = sys.exception()
        if error is None or not isinstance(error.__context__, MemoryError):
            super().send_400_response(msg)
        elif self._has_begun_response:
            self.transport.close()
        else:
            self._refuse(503, "There is not enough memory for this request. Try again shortly.")

    def on_message_complete(self) -> None:
        self._unseen_bytes = 0
        self._awaits_head = self._is_idle = True
        super().on_message_complete()

    def _should_upgrade(self) -> bool:
        """Accept every offer to switch the protocol. Uvicorn calls this method only for a request
        with such an offer. As the result is True, uvicorn calls `handle_websocket_upgrade`, which
        lets the parser read the request again without the offer."""
        return True

    def handle_websocket_upgrade(self) -> None:
        """Let the parser read a request again, without the request's header `upgrade`. With this
        header, a client offers to switch to another protocol.

        The parser raises an exception when it reads such a request. Uvicorn calls this method while
        it handles the exception, whatever protocol the client offers. The argument of the exception
        is the position of the first byte after the request's head.
        """
        method = self.parser.get_method()
        error = sys.exception()
        assert error is not None, "uvicorn calls this method while it handles an exception"
        if method == b"CONNECT":  # the parser expects another protocol after any CONNECT
            return self.send_400_response("Invalid HTTP request received.")
        version = self.parser.get_http_version().encode()
        lines = [method + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self._again = b"\r\n".join([*lines, b"", b""]) + self._data[error.args[0] :]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_next_request()

    def _make_room(self, now: float) -> bool:
        """Close another connection that is idle or whose request head is unfinished. Return False
        if there is no such connection."""
        if self.shared.idle:
            oldest = next(iter(self.shared.idle))
            del self.shared.idle[oldest]
            reason = "the limit on open connections is reached, and they were idle"
            self.shared.log_closed(reason, now)
            oldest.transport.close()
            return True
        slowest = next(iter(self.shared.unfinished), None)
        if slowest is None or now - slowest._part_started_at <= MIN_AGE_S:
            return False
        slowest._close_slow("the limit on open connections is reached, and they sent no request")
        return True

    def _await_next_request(self) -> None:
        """Register the connection as idle if its latest request has arrived and is answered.

        Also start uvicorn's keep-alive timer if it does not run. Uvicorn starts the timer when the
        answer is complete, but a part of the request's body that arrives later stops the timer.
        """
        if not self._is_idle or self._is_answering or self.transport.is_closing():
            return
        self.shared.idle[self] = None
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _count(self, num_bytes: int) -> None:
        self._unseen_bytes = 0
        self._head_bytes += num_bytes + PER_PART_BYTES
        if self._head_bytes > MAX_HEAD_BYTES:
            # the parser turns this exception into one of its own
            raise ValueError("the request's head is too long")

    def _start_part(self, num_bytes: int = 0) -> None:
        self._part_started_at = self.loop.time()
        self._part_bytes = num_bytes

    def _watch(self) -> None:
        """Start the timer that limits the arrival of the current head or body.

        If a head is arriving, register that the connection has an unfinished head. If there are too
        many such connections, close the connection whose head began first.
        """
        self._timer = self.loop.call_at(self._deadline, self._check_arrival)
        if not self._awaits_head or self._is_answering:
            return
        unfinished = self.shared.unfinished
        unfinished[self] = None
        oldest = next(iter(unfinished))
        age_s = self.loop.time() - oldest._part_started_at
        if len(unfinished) > self.shared.limits.num_unfinished_heads and age_s > MIN_AGE_S:
            oldest._close_slow("too many request heads are unfinished")

    def _unwatch(self) -> None:
        self.shared.unfinished.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _deadline(self) -> float:
        return self.shared.limits.deadline(self._part_started_at, self._part_bytes)

    @property
    def _is_answering(self) -> bool:
        """Whether a request is being answered, so that closing the connection would cut off the
        response.

        Bytes that arrive in the meantime, such as a part of a pipelined request, have no time
        limit.
        """
        is_open = self.cycle is not None and not self.cycle.response_complete
        return bool(self.pipeline) or (self._awaits_head and is_open)

    @property
    def _has_begun_response(self) -> bool:
        """Whether a response has begun and has not ended."""
        cycle = self.cycle
        return cycle is not None and cycle.response_started and not cycle.response_complete

    def _check_arrival(self) -> None:
        now = self.loop.time()
        # The client is not slow if the server has stopped reading, or if the client waits for its
        # answer.
        if self.flow.read_paused or self._is_answering:
            self._part_started_at = now
        if now >= self._deadline:
            part = "head" if self._awaits_head else "body"
            return self._close_slow(f"the {part} of the request did not arrive in time")
        self._timer = self.loop.call_at(self._deadline, self._check_arrival)

    def _close_slow(self, reason: str) -> None:
        self.shared.log_closed(reason, self.loop.time())
        self._unwatch()
        is_begun = self._part_bytes > 0 if self._awaits_head else not self.cycle.response_started
        if is_begun:
            return self._refuse(408, "The request did not arrive in time.")
        # No error response is sent: the browser opened a spare connection, or a response has begun.
        self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Send an error response in the format of vLLM's errors, and close the connection."""
        body = json.dumps(error_body(message, _KINDS[status], status)).encode()
        head = (
            f"HTTP/1.1 {status} {_KINDS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


_KINDS = {408: "Request Timeout", 503: "Service Unavailable"}
