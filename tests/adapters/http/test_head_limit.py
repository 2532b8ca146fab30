"""Request heads that never end, sent to a real uvicorn server on a socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator

import pytest
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from fakevllm_adapters.http.access_guard import Guard, GuardMiddleware
from fakevllm_adapters.http.asgi import Receive, Scope, Send, read_body, send_json
from fakevllm_adapters.http.head_limit import MAX_HEAD_BYTES, limit_head

HEAD = b"POST /v1/x HTTP/1.1\r\nhost: localhost\r\n"


class TestServer(uvicorn.Server):
    """A server that leaves the signal handlers of pytest alone."""

    __test__ = False

    @contextlib.contextmanager
    def capture_signals(self):  # pyright: ignore[reportUnknownParameterType]
        yield


async def echo_app(scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, 200, len(await read_body(receive)))


@contextlib.asynccontextmanager
async def connected() -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = GuardMiddleware(echo_app, Guard())
        settings = uvicorn.Config(
            app, http=limit_head(AutoHTTPProtocol), lifespan="off", log_level="critical"
        )
        server = TestServer(settings)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        try:
            yield reader, writer
        finally:
            writer.close()
            server.should_exit = True
            await serving


async def answer_to(*parts: bytes) -> bytes:
    """Send the parts and return what the server sends until it closes the connection.

    The server must close the connection while the client still sends.
    """
    async with connected() as (reader, writer):
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
        received = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                received = await reader.read()
        return received


@pytest.mark.parametrize(
    "unit",
    [
        pytest.param(b"x-a: b\r\n" * 1000, id="headers without end"),
        pytest.param(b"x" * 10_000, id="one name without end"),
        pytest.param(b"x-a: " + b"y" * 10_000, id="one value without end"),
    ],
)
async def test_a_head_that_never_ends_is_refused_and_the_connection_closed(unit: bytes) -> None:
    received = await answer_to(HEAD, *[unit] * (2 * MAX_HEAD_BYTES // len(unit)))
    assert (
        received == b"" or b"400 Bad Request" in received
    )  # data sent after the close may reset the connection


async def test_trailers_that_never_end_are_refused_and_the_connection_closed() -> None:
    start = HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    unit = b"x-a: " + b"y" * 10_000
    await answer_to(start, *[unit] * (2 * MAX_HEAD_BYTES // len(unit)))


async def test_a_url_that_never_ends_is_refused() -> None:
    received = await answer_to(b"GET /", *[b"x" * 10_000] * (2 * MAX_HEAD_BYTES // 10_000))
    assert received == b"" or b"400 Bad Request" in received


async def test_large_bodies_and_many_requests_on_one_connection_are_served() -> None:
    size = 4 * MAX_HEAD_BYTES
    async with connected() as (reader, writer):
        for _ in range(3):
            head = HEAD + b"x-a: " + b"y" * 50_000 + b"\r\ncontent-length: %d\r\n\r\n" % size
            writer.write(head + b"z" * size)
            received = await reader.readuntil(b"\r\n\r\n")
            assert received.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(len(str(size))) == b"%d" % size


def test_a_protocol_with_a_limit_of_its_own_is_returned_unchanged() -> None:
    assert limit_head(H11Protocol) is H11Protocol
