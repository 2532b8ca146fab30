"""The server's client to its engine: one call forwarded, captured where it belongs to an
episode."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from fakevllm_adapters.formats.base import EngineInfo, Exchange
from fakevllm_adapters.formats.chat import stream_end
from fakevllm_adapters.formats.sse import DONE, SseDecoder, encode, parse_event
from fakevllm_adapters.http.asgi import (
    Headers,
    Send,
    error_object,
    is_final_status,
    reason_headers,
    relayed_headers,
    send_bytes,
    send_chunk,
    start_stream,
)
from fakevllm_adapters.protocol.errors import internal_error
from fakevllm_adapters.protocol.reasons import REASON_HEADER, OutageReason, reason_from_header
from fakevllm_server.rollout.capture.base import CallCapture
from fakevllm_server.types.backend import Endpoint

Json = dict[str, Any]

CALL_TIMEOUT_S = 3600
HEALTH_TIMEOUT_S = 5
IDLE_CONNECTION_S = 3
"""Below the five seconds after which vLLM closes an idle connection, so that none is reused while
it closes."""
log = logging.getLogger("fakevllm.server")

REFUSED = 400
_JSON: Headers = [(b"content-type", b"application/json")]
Refuses = Callable[[int, Json], bool]
"""(status, error body): whether the caller asks another way instead of passing that on."""
_TROUBLE = (500, 502, 503)
"""What an engine answers while it dies, and sometimes while it lives."""
_REASON_OF_STATUS = {
    429: OutageReason.ENGINE_BUSY,
    502: OutageReason.ENGINE_FAILED,
    503: OutageReason.ENGINE_BUSY,
    504: OutageReason.ENGINE_FAILED,
}
"""The reason of an engine's error where the engine sends no reason itself, as vLLM."""


class EngineFailed(Exception):
    """The engine gave no answer and nothing was sent to the client: the call may be sent again."""


class Refused(Exception):
    """The engine answered an error to a call that can be asked another way; nothing was sent."""

    def __init__(self, status: int, raw: bytes, headers: Headers) -> None:
        super().__init__(f"{status}: {raw[:200]!r}")
        self.status = status
        self.raw = raw
        self.headers = headers

    @property
    def body(self) -> Json:
        """vLLM's error body, or what stands for it."""
        return error_object(self.raw) or internal_error().body


class EngineClient:
    """Connections to one engine."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        connector: aiohttp.BaseConnector
        if endpoint.socket is not None:
            connector = aiohttp.UnixConnector(
                str(endpoint.socket), limit=0, keepalive_timeout=IDLE_CONNECTION_S
            )
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
        self._http = aiohttp.ClientSession(
            endpoint.url,
            connector=connector,
            headers=endpoint.headers,
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S),
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )

        self._version: str | None = None

    async def close(self) -> None:
        await self._http.close()

    @property
    def facts(self) -> EngineInfo:
        return EngineInfo(self.endpoint.model_name, self.endpoint.max_model_len, self._version)

    async def learn_version(self) -> None:
        """Asks the engine for it, where it tells."""
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        try:
            async with self._http.get("/version", timeout=timeout) as answer:
                self._version = str((await answer.json())["version"])
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            self._version = None

    async def is_well(self) -> bool:
        """Whether it says of itself that it can answer calls."""
        if self._http.closed:
            return False
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        try:
            async with self._http.get("/health", timeout=timeout) as answer:
                return answer.status < 500
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def relay(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        send: Send,
        refuses: Refuses | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """The engine's answer as it is, or as `exchange` words it. Raises EngineFailed while
        nothing has been sent; Refused for an error that `refuses`."""
        async with self._answer(method, path, body, headers) as answer:
            await self._relay(answer, send, refuses, exchange)

    async def capture(
        self,
        path: str,
        capture: CallCapture,
        headers: dict[str, str],
        send: Send,
        on_finished: Callable[[], Awaitable[None]],
        refuses: Refuses | None = None,
        exchange: Exchange | None = None,
        plain: bytes | None = None,
    ) -> None:
        """The engine's answer as the app may see it. `plain`: the call as the client wrote it.

        `on_finished` runs before the last byte goes out, so that a client that acts on the answer
        at once finds the call recorded. Raises EngineFailed while nothing has been sent; Refused
        for an error that `refuses`."""
        body = orjson.dumps(capture.upstream_body())
        async with self._answer("POST", path, body, headers) as answer:
            if answer.status == 200:
                return await self._capture(answer, capture, send, on_finished, exchange)
            if answer.status != REFUSED:
                return await self._relay(answer, send, refuses)
        # A refusal repeats what was asked, so the app's own words must be what is refused.
        own = plain if plain is not None else orjson.dumps(capture.body)
        async with self._answer("POST", path, own, headers) as answer:
            await self._relay(answer, send, refuses, exchange)
            if answer.status == 200:
                capture.gave_up()
                await on_finished()

    async def _relay(
        self,
        answer: aiohttp.ClientResponse,
        send: Send,
        refuses: Refuses | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        shown = relayed_headers(answer.headers.items())
        if answer.status >= REFUSED:
            shown += reason_headers(_outage_reason(answer))
            refused = Refused(answer.status, await _whole(answer), shown)
            if refuses is not None and refuses(refused.status, refused.body):
                raise refused
            return await send_bytes(send, refused.status, refused.raw, refused.headers)
        if answer.content_type == "text/event-stream":
            chunks = await self._begun(answer)
            return await _stream(send, answer.status, shown, chunks, exchange)
        await send_bytes(send, answer.status, _worded(await _whole(answer), exchange), shown)

    async def _capture(
        self,
        answer: aiohttp.ClientResponse,
        capture: CallCapture,
        send: Send,
        on_finished: Callable[[], Awaitable[None]],
        exchange: Exchange | None,
    ) -> None:
        shown = relayed_headers(answer.headers.items())
        if answer.content_type == "text/event-stream":
            events = _captured(await self._begun(answer), capture, on_finished)
            return await _stream(send, answer.status, shown, events, exchange)
        raw = _worded(capture.answer(await _whole(answer)), exchange)
        await on_finished()
        await send_bytes(send, answer.status, raw, shown)

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        if self._http.closed:
            raise EngineFailed("its client is closed")
        try:
            async with self._http.request(
                method, path, data=body or None, headers=headers, allow_redirects=False
            ) as answer:
                if not is_final_status(answer.status):
                    raise EngineFailed(f"it answered {answer.status}")
                if answer.status in _TROUBLE and not await self.is_well():
                    raise EngineFailed(f"it answered {answer.status} and is not well")
                yield answer
        except aiohttp.ClientError as error:
            raise EngineFailed(str(error)) from error

    async def _begun(self, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """A stream that has its first bytes: until then nothing is sent, and all can be sent
        again. Raises EngineFailed, aiohttp.ClientError."""
        chunks = _chunks(answer)
        first = await anext(chunks, b"")
        if _is_trouble(first) and not await self.is_well():
            raise EngineFailed("its stream began with an error")
        return _joined(first, chunks)


def _outage_reason(answer: aiohttp.ClientResponse) -> OutageReason | None:
    """Return the reason that the engine itself sends, or the one that its status implies. A 503
    comes here only from an engine that reports itself healthy, so a 503 means too much load."""
    sent = reason_from_header(answer.headers.get(REASON_HEADER))
    return sent or _REASON_OF_STATUS.get(answer.status)


async def _whole(answer: aiohttp.ClientResponse) -> bytes:
    return b"".join([chunk async for chunk in _chunks(answer)])


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Raises aiohttp.ClientError, whoever closed the connection."""
    try:
        async for chunk in answer.content.iter_any():
            yield chunk
    except RuntimeError as error:  # aiohttp's, where it was this side
        raise aiohttp.ClientPayloadError(str(error)) from error


def _is_trouble(first: bytes) -> bool:
    """Whether a stream begins with an error instead of an answer."""
    events = SseDecoder().feed(first)
    try:
        return not first or "error" in ((parse_event(events[0]) if events else None) or {})
    except ValueError:
        return False


async def _joined(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for chunk in chunks:
        yield chunk


async def _captured(
    chunks: AsyncIterator[bytes], capture: CallCapture, on_finished: Callable[[], Awaitable[None]]
) -> AsyncIterator[bytes]:
    """Raises aiohttp.ClientError where the engine's stream has no end."""
    decoder = SseDecoder()
    is_done = False
    async for chunk in chunks:
        events = decoder.feed(chunk)
        out = b"".join(map(capture.event, events))
        if DONE in events and not is_done:
            is_done = True
            await on_finished()
        if out:
            yield out
    if not is_done:
        raise aiohttp.ClientPayloadError("the stream ended without [DONE]")


async def _stream(
    send: Send,
    status: int,
    headers: Headers,
    chunks: AsyncIterator[bytes],
    exchange: Exchange | None = None,
) -> None:
    """Once the status is out a broken engine can only be told of inside the stream, and it is:
    never a bare end."""
    await start_stream(send, status, headers)
    error = internal_error().body
    try:
        async for chunk in chunks if exchange is None else told(chunks, exchange):
            if chunk:
                await send_chunk(send, chunk)
    except (aiohttp.ClientError, TimeoutError):
        await send_chunk(send, exchange.end_with_error(error) if exchange else encode(error) + DONE)
    await send_chunk(send, b"", last=True)


def _worded(raw: bytes, exchange: Exchange | None) -> bytes:
    """Raises Refused for an answer that cannot be told in the client's format: nothing was sent,
    and asked again it would be sampled again."""
    try:
        return raw if exchange is None else exchange.answer(raw)
    except ValueError as error:
        log.warning("an answer cannot be told in the client's format: %s", error)
        raise Refused(500, orjson.dumps(internal_error().body), _JSON) from error


# A stream of the engine's as the client's format tells it.


async def told(chunks: AsyncIterator[bytes], exchange: Exchange) -> AsyncIterator[bytes]:
    """Closed where the engine left it open."""
    decoder = SseDecoder()
    taken: list[bytes] = []
    async for chunk in chunks:
        events = decoder.feed(chunk)
        taken += events
        yield b"".join(map(exchange.event, events))
    if DONE not in taken:
        yield stream_end(exchange, taken)
