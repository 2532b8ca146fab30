"""HTTP client for model calls to the swarm server: forwarding, streaming, cancelling, connection
pool. The proxy sends all its model calls with this client.

The client uses aiohttp. With httpx, forwarding a call would cost ten times as much CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import aiohttp

from fakevllm.runtime.task_set import TaskSet
from fakevllm_adapters.formats.sse import SseDecoder, data_of, encode, parse_event
from fakevllm_adapters.http.asgi import Headers, is_final_status, relayed_headers
from fakevllm_adapters.protocol.errors import WireError, internal_error, unavailable
from fakevllm_adapters.protocol.keys import bearer_header
from fakevllm_adapters.protocol.outage_reasons import (
    REASON_HEADER,
    OutageReason,
    reason_from_header,
)
from fakevllm_adapters.protocol.swarm import PROXY_HEADERS

log = logging.getLogger("fakevllm.transport.engine_client")

_CUT_OFF = encode(internal_error().body)
"""Event with which the swarm server ends a stream if the engine died during the stream. If a stream
ends with another error, the engine is alive, and the error is part of the engine's answer."""

CALL_TIMEOUT_S = 3600
"""Timeout of a whole call, in seconds."""
CONNECT_TIMEOUT_S = 30
"""Timeout for opening a connection, in seconds. A connection usually opens much faster. The timeout
is long because delays of the proxy's own event loop count too. If the server is unavailable, the
watchdog of the call ends the wait earlier."""
IDLE_CONNECTION_S = 30
"""Seconds for which an idle connection is kept. The server keeps idle connections for longer.
Therefore the proxy never sends a request on a connection that the server is closing."""
DRAIN_TIMEOUT_S = 0.1
"""Maximum number of seconds for reading the rest of a stream after `[DONE]`. If reading takes
longer, the connection is closed and not reused."""
EVENT_STREAM = "text/event-stream"
JSON: Headers = [(b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """A complete response of the upstream server, with its bytes unchanged."""

    status: int
    headers: Headers
    body: bytes
    streamed: bool
    latency_s: float
    is_from_stream: bool = False
    """Whether this response was created from a stream whose first event was an error."""
    parsed_events: list[bytes] | None = None
    """Events of the stream; None if the body has not been split into events yet."""
    reason: OutageReason | None = None
    """Reason of an outage, as the server sent it in a header; None if it sent none."""

    @staticmethod
    def from_events(events: list[bytes], latency_s: float) -> EngineResponse:
        """Return a streamed response of status 200 whose body consists of these events."""
        return EngineResponse(200, [], b"".join(events), True, latency_s, parsed_events=events)

    @property
    def events(self) -> list[bytes]:
        """The server-sent events of this response; [] if the response is not streamed."""
        if self.parsed_events is not None:
            return self.parsed_events
        return SseDecoder().feed(self.body) if self.streamed else []

    def unwrap_early_error(self) -> EngineResponse:
        """If this response is a stream that begins with a permanent error (4xx), return a plain
        response. Its body is the error, and its HTTP status is the error's code. Return any other
        response unchanged.

        Some clients retry without end after an error inside a stream. A 4xx status makes these
        clients give up.
        """
        if not self.streamed or b'"error"' not in self.body:
            return self
        first_event = next(iter(self.events), b"")
        code = _permanent_error_code(first_event)
        if code is None:
            return self
        body = data_of(first_event) or b""
        return EngineResponse(code, JSON, body, False, self.latency_s, is_from_stream=True)

    @property
    def is_broken_off(self) -> bool:
        """Whether the engine died before the end of this streamed response. The server reports this
        by an event in the stream, because the HTTP status has been sent already."""
        return self.streamed and _CUT_OFF in self.body


@dataclass(frozen=True, slots=True)
class LiveResponse:
    """A response whose body is still arriving."""

    status: int
    headers: Headers
    streamed: bool
    chunks: AsyncIterator[bytes]
    reason: OutageReason | None = None
    """Reason of an outage, as the server sent it in a header; None if it sent none."""

    async def read(self) -> bytes:
        """Read the response's body to its end, and return it. Raises WireError (503) if the
        connection fails."""
        return b"".join([chunk async for chunk in self.chunks])


class EngineClient:
    """Client with a pool of connections to one swarm server. Call `close()` after the last call."""

    def __init__(self, url: str, key: str | None) -> None:
        self._drains = TaskSet(log, "the rest of a stream after [DONE] could not be read")
        self._http = aiohttp.ClientSession(
            url,
            headers=bearer_header(key) | PROXY_HEADERS,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S),
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
        )

    @property
    def num_draining(self) -> int:
        """Number of responses that are read to their end in the background, after the app's request
        is over. A connection can be reused only after its response was read to the end."""
        return len(self._drains)

    async def close(self) -> None:
        await self._drains.close()
        await self._http.close()

    async def call(self, path: str, body: bytes, headers: Mapping[str, str]) -> EngineResponse:
        """Send a model call to the server, and return the complete response.

        Raises WireError (503) if the server cannot be reached. Raises WireError (503) as well if
        the connection or the engine fails before the end of the response.
        """
        started = time.monotonic()
        try:
            async with self._http.post(
                path, data=body, headers=headers, allow_redirects=False
            ) as response:
                if not is_final_status(response.status):
                    raise _bad_status(response)
                raw = await response.read()
                reply = EngineResponse(
                    response.status,
                    relayed_headers(response.raw_headers),
                    raw,
                    _is_stream(response),
                    time.monotonic() - started,
                    reason=_reason(response),
                )
                if reply.is_broken_off:
                    raise aiohttp.ClientPayloadError("the engine broke off")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise unreachable(error) from error
        return reply.unwrap_early_error()

    def live(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[LiveResponse]:
        """Return a context manager that sends a call and yields the response. The body of the
        response arrives while the block runs.

        If the connection cannot be opened, WireError (503) is raised when the block is entered. If
        the connection breaks later, WireError (503) is raised when the body is read.
        """
        return _Live(
            self._http.request(
                method, path, data=body or None, headers=headers, allow_redirects=False
            ),
            self._drains,
        )


class _Live(AbstractAsyncContextManager[LiveResponse]):
    """Context manager that sends one call and yields the response. The body of the response arrives
    while the block runs.

    This is a class, because a generator would increase the cost of a call with aiohttp by a tenth.
    """

    def __init__(
        self,
        request: AbstractAsyncContextManager[aiohttp.ClientResponse],
        drains: TaskSet,
    ) -> None:
        self._request = request
        self._drains = drains

    async def __aenter__(self) -> LiveResponse:
        try:
            response = await self._request.__aenter__()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise unreachable(error) from error
        if not is_final_status(response.status):
            response.close()
            raise unreachable(_bad_status(response))
        self._response = response
        return LiveResponse(
            response.status,
            relayed_headers(response.raw_headers),
            _is_stream(response),
            _Chunks(response.content),
            _reason(response),
        )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if kind is None and not self._response.content.at_eof():
            # The connection is drained in the background: the app's request is over, and its record
            # is to be written now.
            drain = self._drains.start(self._drain())
            # The callback also runs if the task is cancelled before it begins. Closing a response
            # that was read to its end has no effect.
            drain.add_done_callback(lambda _: self._response.close())
            return
        await self._request.__aexit__(kind, error, at)
        if isinstance(error, aiohttp.ClientError | TimeoutError):
            raise unreachable(error) from error

    async def _drain(self) -> None:
        """Read the bytes that follow the last event of a stream, so that the connection can be
        reused."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while await self._response.content.readany():
                    pass


def _is_stream(response: aiohttp.ClientResponse) -> bool:
    return response.status == 200 and response.content_type == EVENT_STREAM


def _bad_status(response: aiohttp.ClientResponse) -> aiohttp.ClientError:
    """Return the error for a response with a status that must not be relayed to the app, such as a
    redirect."""
    return aiohttp.ClientPayloadError(f"status {response.status}")


def _reason(response: aiohttp.ClientResponse) -> OutageReason | None:
    return reason_from_header(response.headers.get(REASON_HEADER))


class _Chunks(AsyncIterator[bytes]):
    """Asynchronous iterator over the chunks of a response's body, as they arrive. Raises WireError
    (503) if the connection fails.

    This is a class and not a generator, because asyncio would spend time on the registration of an
    asynchronous generator.
    """

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    async def __anext__(self) -> bytes:
        try:
            chunk = await self._content.readany()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise unreachable(error) from error
        if not chunk:
            raise StopAsyncIteration
        return chunk


def _permanent_error_code(event: bytes) -> int | None:
    """If a stream's event is an error with a 4xx code, return the code. Return None for any other
    event."""
    if b'"error"' not in event:
        return None
    try:
        error: Any = (parse_event(event) or {}).get("error")
    except ValueError:
        return None
    code: Any = cast(dict[str, Any], error).get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 500 else None


def unreachable(error: Exception) -> WireError:
    """Return the WireError (503) for a connection to the swarm server that could not be opened, or
    that broke."""
    is_refused = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    reason = OutageReason.SERVER_UNREACHABLE if is_refused else OutageReason.SERVER_BROKE_OFF
    kind = type(error).__name__
    return unavailable(
        f"The model server cannot be reached at the moment ({kind}). Try again shortly.", reason
    )
