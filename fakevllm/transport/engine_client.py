"""The only HTTP client to the swarm server's models: forward, stream, cancel, pool.

aiohttp and not httpx: the same forwarded call costs a tenth of the CPU.
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
from fakevllm_adapters.protocol.reasons import REASON_HEADER, OutageReason, reason_from_header
from fakevllm_adapters.protocol.swarm import PROXY_HEADERS

log = logging.getLogger("fakevllm.transport.engine_client")

_CUT_OFF = encode(internal_error().body)
"""The server's own words: an engine that lives may end a stream in an error of its own, and that is
an answer."""

CALL_TIMEOUT_S = 3600
IDLE_CONNECTION_S = 30
"""Below the server's own keep-alive, so that no connection is reused while it closes."""
EVENT_STREAM = "text/event-stream"
JSON: Headers = [(b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """A whole answer of the upstream, with its bytes as they came."""

    status: int
    headers: Headers
    body: bytes
    streamed: bool
    latency_s: float
    is_from_stream: bool = False
    """An error that came as the first event of a stream, told as a status."""
    parsed_events: list[bytes] | None = None
    """The events, where they are known already."""
    reason: OutageReason | None = None
    """Reason that the server sent with an error, None where it sent none."""

    @staticmethod
    def from_events(events: list[bytes], latency_s: float) -> EngineResponse:
        return EngineResponse(200, [], b"".join(events), True, latency_s, parsed_events=events)

    @property
    def events(self) -> list[bytes]:
        if self.parsed_events is not None:
            return self.parsed_events
        return SseDecoder().feed(self.body) if self.streamed else []

    def unwrap_early_error(self) -> EngineResponse:
        """A stream that begins with an error that will not heal, as a status: clients ask again
        without end for what fails inside a stream, and take a status for final."""
        if not self.streamed or b'"error"' not in self.body:
            return self
        first = next(iter(self.events), b"")
        code = _permanent_error_code(first)
        if code is None:
            return self
        body = data_of(first) or b""
        return EngineResponse(code, JSON, body, False, self.latency_s, is_from_stream=True)

    @property
    def is_broken_off(self) -> bool:
        """Whether this is a stream that the engine did not live to end: its server can only say so
        inside it."""
        return self.streamed and _CUT_OFF in self.body


@dataclass(frozen=True, slots=True)
class LiveResponse:
    """An answer that is still coming."""

    status: int
    headers: Headers
    streamed: bool
    chunks: AsyncIterator[bytes]
    reason: OutageReason | None = None
    """Reason that the server sent with an error, None where it sent none."""


DRAIN_TIMEOUT_S = 0.1
"""For what is behind the end of a stream, before its connection is given up."""


class EngineClient:
    def __init__(self, url: str, key: str | None) -> None:
        self._drains = TaskSet(log, "what is behind a stream's end could not be read")
        self._http = aiohttp.ClientSession(
            url,
            headers=bearer_header(key) | PROXY_HEADERS,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S, sock_connect=5),
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
        )

    @property
    def num_draining(self) -> int:
        """Calls that are over but for what is behind their end."""
        return len(self._drains)

    async def close(self) -> None:
        await self._drains.close()
        await self._http.close()

    async def call(self, path: str, body: bytes, headers: Mapping[str, str]) -> EngineResponse:
        """Raises WireError (503) where the server cannot be reached, or it or its engine breaks
        off."""
        started = time.monotonic()
        try:
            async with self._http.post(
                path, data=body, headers=headers, allow_redirects=False
            ) as answer:
                if not is_final_status(answer.status):
                    raise _bad_status(answer)
                raw = await answer.read()
                streamed = answer.status == 200 and answer.content_type == EVENT_STREAM
                shown = relayed_headers(answer.headers.items())
                latency_s = time.monotonic() - started
                reason = _reason(answer)
                reply = EngineResponse(
                    answer.status, shown, raw, streamed, latency_s, reason=reason
                )
                if reply.is_broken_off:
                    raise aiohttp.ClientPayloadError("its engine broke off")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise unreachable(error) from error
        return reply.unwrap_early_error()

    def live(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[LiveResponse]:
        """One answer, while its connection is open. Trouble with it is a WireError (503), also
        inside the block."""
        return _Live(
            self._http.request(
                method, path, data=body or None, headers=headers, allow_redirects=False
            ),
            self._drains,
        )


class _Live(AbstractAsyncContextManager[LiveResponse]):
    """A class, for a generator would cost each call a tenth of what aiohttp costs."""

    def __init__(
        self,
        asked: AbstractAsyncContextManager[aiohttp.ClientResponse],
        drains: TaskSet,
    ) -> None:
        self._asked = asked
        self._drains = drains

    async def __aenter__(self) -> LiveResponse:
        try:
            answer = await self._asked.__aenter__()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise unreachable(error) from error
        if not is_final_status(answer.status):
            answer.close()
            raise unreachable(_bad_status(answer))
        self._answer = answer
        streamed = answer.status == 200 and answer.content_type == EVENT_STREAM
        shown = relayed_headers(answer.headers.items())
        return LiveResponse(answer.status, shown, streamed, _chunks(answer), _reason(answer))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if kind is None and not self._answer.content.at_eof():
            # Beside the app: its request is over, and a row waits to be written.
            rest = self._drains.start(self._drain())
            # Also where it is cancelled before it begins. What came to its end is closed already.
            rest.add_done_callback(lambda _: self._answer.close())
            return
        await self._asked.__aexit__(kind, error, at)
        if isinstance(error, aiohttp.ClientError | TimeoutError):
            raise unreachable(error) from error

    async def _drain(self) -> None:
        """What is behind the end of a stream, so that its connection can be used again."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while await self._answer.content.readany():
                    pass


def _bad_status(answer: aiohttp.ClientResponse) -> aiohttp.ClientError:
    """For what is no answer to pass on."""
    return aiohttp.ClientPayloadError(f"status {answer.status}")


def _reason(answer: aiohttp.ClientResponse) -> OutageReason | None:
    return reason_from_header(answer.headers.get(REASON_HEADER))


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Raises WireError (503)."""
    try:
        while chunk := await answer.content.readany():
            yield chunk
    except (aiohttp.ClientError, TimeoutError) as error:
        raise unreachable(error) from error


def _permanent_error_code(event: bytes) -> int | None:
    """The code of the error in an event, where it is one of 4xx."""
    if b'"error"' not in event:
        return None
    try:
        error: Any = (parse_event(event) or {}).get("error")
    except ValueError:
        return None
    code: Any = cast(dict[str, Any], error).get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 500 else None


def unreachable(error: Exception) -> WireError:
    """Return the 503 for a connection that could not be opened or that broke."""
    is_refused = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    reason = OutageReason.SERVER_UNREACHABLE if is_refused else OutageReason.SERVER_BROKE_OFF
    kind = type(error).__name__
    return unavailable(
        f"The model server cannot be reached at the moment ({kind}). Try again shortly.", reason
    )
