"""The HTTP client for model calls: its connections after a call, and broken streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from fakevllm.transport.engine_client import EngineClient
from fakevllm_adapters.formats.sse import DONE, encode
from fakevllm_adapters.protocol.errors import WireError, bad_request, internal_error
from fakevllm_adapters.protocol.outage_reasons import OutageReason


@dataclass
class StreamingServer:
    """A server that streams `[DONE]` and delays the end of its responses."""

    connections: list[object] = field(default_factory=list[object])
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.connections.append(request.transport)
        shown = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await shown.prepare(request)
        await shown.write(DONE)
        await self.may_end.wait()
        return shown


@pytest.fixture
async def streaming() -> AsyncGenerator[tuple[StreamingServer, EngineClient]]:
    engine = StreamingServer()
    app = web.Application()
    app.router.add_post("/", engine.answer)
    async with TestServer(app) as server:
        upstream = EngineClient(str(server.make_url("")), None)
        try:
            yield engine, upstream
        finally:
            engine.may_end.set()
            await upstream.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def read_to_done(upstream: EngineClient) -> None:
    async with upstream.live("POST", "/", b"{}", {}) as live:
        async for chunk in live.chunks:
            if chunk == DONE:
                return


async def test_a_call_ends_at_done_and_its_connection_is_reused(
    streaming: tuple[StreamingServer, EngineClient],
) -> None:
    engine, upstream = streaming
    await read_to_done(upstream)
    assert not engine.may_end.is_set(), "the call did not wait for the end of the response"
    engine.may_end.set()
    await until(lambda: not upstream.num_draining)
    await read_to_done(upstream)
    assert len(engine.connections) == 2 and len(set(engine.connections)) == 1


async def test_a_connection_that_does_not_end_after_done_is_closed(
    streaming: tuple[StreamingServer, EngineClient],
) -> None:
    engine, upstream = streaming
    await read_to_done(upstream)
    await until(lambda: not upstream.num_draining)
    await read_to_done(upstream)
    assert len(set(engine.connections)) == 2


async def test_closing_does_not_wait_for_connections_that_do_not_end(
    streaming: tuple[StreamingServer, EngineClient],
) -> None:
    engine, upstream = streaming
    await read_to_done(upstream)
    await upstream.close()
    assert not upstream.num_draining and not engine.may_end.is_set()


TOKEN = encode({"choices": [{"index": 0, "delta": {"content": 'it says {"error": 500}'}}]})


async def answer_to_a_call(events: bytes) -> bytes:
    """Return the body that `EngineClient.call` returns for a stream of these events."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=events, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/", answer)
    async with TestServer(app) as server:
        upstream = EngineClient(str(server.make_url("")), None)
        try:
            return (await upstream.call("/", b"{}", {})).body
        finally:
            await upstream.close()


async def test_a_stream_whose_engine_broke_off_is_an_outage_that_may_be_retried() -> None:
    with pytest.raises(WireError) as raised:
        await answer_to_a_call(TOKEN + encode(internal_error().body) + DONE)
    assert raised.value.status == 503
    assert raised.value.reason is OutageReason.SERVER_BROKE_OFF


@pytest.mark.parametrize("end", [b"", encode(bad_request("no").body)])
async def test_a_stream_that_ends_in_another_way_is_returned_unchanged(end: bytes) -> None:
    assert await answer_to_a_call(TOKEN + end + DONE) == TOKEN + end + DONE
