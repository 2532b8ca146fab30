"""The server's client to its engine: one call forwarded, captured where it belongs to an
episode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import orjson

from fakevllm_adapters.asgi import (
    Headers,
    Send,
    relayed_headers,
    send_bytes,
    send_chunk,
    start_stream,
)
from fakevllm_adapters.errors import internal_error
from fakevllm_adapters.sse import DONE, SseDecoder, encode
from fakevllm_server.backends.base import Endpoint
from fakevllm_server.capture import Capture

Json = dict[str, Any]

CALL_TIMEOUT_S = 3600
IDLE_CONNECTION_S = 3
"""Below the five seconds after which vLLM closes an idle connection, so that none is reused while
it closes."""


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
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S),
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )

    async def close(self) -> None:
        await self._http.close()

    async def relay(
        self, method: str, path: str, body: bytes, headers: dict[str, str], send: Send
    ) -> None:
        """The engine's answer as it is. Raises aiohttp.ClientError while nothing has been sent."""
        async with self._http.request(method, path, data=body or None, headers=headers) as answer:
            shown = relayed_headers(answer.headers.items())
            if answer.content_type != "text/event-stream":
                return await send_bytes(send, answer.status, await answer.read(), shown)
            await _stream(send, answer.status, shown, answer.content.iter_any())

    async def capture(
        self,
        path: str,
        capture: Capture,
        headers: dict[str, str],
        send: Send,
        on_finished: Callable[[], None],
    ) -> None:
        """The engine's answer as the app may see it. `on_finished` runs before its last byte goes
        out, so that
        a client that acts on the answer at once finds the call recorded."""
        body = orjson.dumps(capture.upstream_body())
        async with self._http.request("POST", path, data=body, headers=headers) as answer:
            shown = relayed_headers(answer.headers.items())
            if answer.content_type == "text/event-stream":
                events = _captured(answer.content.iter_any(), capture, on_finished)
                return await _stream(send, answer.status, shown, events)
            raw = await answer.read()
            if answer.status == 200:
                raw = orjson.dumps(capture.answer(orjson.loads(raw)))
                on_finished()
            await send_bytes(send, answer.status, raw, shown)


async def _captured(
    chunks: AsyncIterator[bytes], capture: Capture, on_finished: Callable[[], None]
) -> AsyncIterator[bytes]:
    decoder = SseDecoder()
    async for chunk in chunks:
        events = decoder.feed(chunk)
        shown = [capture.event(event) for event in events]
        if DONE in events:
            on_finished()
        out = b"".join(event for event in shown if event is not None)
        if out:
            yield out


async def _stream(send: Send, status: int, headers: Headers, chunks: AsyncIterator[bytes]) -> None:
    """Once the status is out a broken engine can only be told of inside the stream, and it is:
    never a bare end."""
    await start_stream(send, status, headers)
    try:
        async for chunk in chunks:
            await send_chunk(send, chunk)
    except (aiohttp.ClientError, TimeoutError):
        await send_chunk(send, encode(internal_error().body) + DONE)
    await send_chunk(send, b"", last=True)
