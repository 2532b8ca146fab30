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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fakevllm_adapters.http.access_guard import Guard, GuardMiddleware
from fakevllm_adapters.http.asgi import AsgiApp, Receive, Scope, Send, read_body, send_json
from fakevllm_runtime.http_protocol import MAX_HEAD_BYTES, ArrivalLimits, limited_protocol

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
async def connected(
    limits: ArrivalLimits | None = None, endpoint: AsgiApp = echo_app, keep_alive_s: int = 60
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = GuardMiddleware(endpoint, Guard())
        settings = uvicorn.Config(
            app,
            http=limited_protocol(AutoHTTPProtocol, limits),
            lifespan="off",
            log_level="critical",
            timeout_keep_alive=keep_alive_s,
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
            async with asyncio.timeout(30):
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
    assert limited_protocol(H11Protocol) is H11Protocol


QUICK = ArrivalLimits(base_s=0.3, min_rate=1e6)


async def test_a_head_that_does_not_arrive_in_time_gets_a_408_in_vllms_form() -> None:
    async with connected(QUICK) as (reader, writer):
        writer.write(HEAD)
        received = await reader.read()
    assert received.startswith(b"HTTP/1.1 408") and b'"code": 408' in received


async def test_a_connection_without_a_request_is_closed_without_a_word() -> None:
    async with connected(QUICK) as (reader, _):
        assert await reader.read() == b""


async def test_a_body_that_does_not_arrive_in_time_gets_a_408() -> None:
    async with connected(QUICK) as (reader, writer):
        writer.write(HEAD + b"content-length: 9\r\n\r\nhalf")
        received = await reader.read()
    assert received.startswith(b"HTTP/1.1 408")


async def test_a_head_sent_byte_by_byte_is_closed_although_bytes_keep_coming() -> None:
    async with connected(QUICK) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(b"G")
                await writer.drain()
                await asyncio.sleep(0.02)
        with contextlib.suppress(ConnectionError):
            assert b"200 OK" not in await reader.read()
        assert reader.at_eof() or reader.exception() is not None


async def test_a_second_request_on_a_connection_has_its_own_time() -> None:
    async with connected(QUICK) as (reader, writer):
        for _ in range(3):
            writer.write(HEAD + b"content-length: 2\r\n\r\n")
            await asyncio.sleep(0.2)
            writer.write(b"ab")
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(1) == b"2"
            await asyncio.sleep(0.2)


async def test_a_body_that_the_app_reads_late_is_not_counted_as_slow() -> None:
    started = asyncio.Event()

    async def late_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await started.wait()
            await send_json(send, 200, len(await read_body(receive)))

    size = 2**20
    async with connected(QUICK, late_app) as (reader, writer):
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % size + b"z" * size)
        await asyncio.sleep(1)
        started.set()
        received = await reader.readuntil(b"\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 200")


SMALL = HEAD + b"content-length: 2\r\n\r\nab"


async def send_small(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Send a request with a body of two bytes, and return the head of the response."""
    writer.write(SMALL)
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 200"):
        assert await reader.readexactly(1) == b"2"
    return head


async def test_beyond_the_limit_of_connections_a_new_one_gets_a_503() -> None:
    async with connected(ArrivalLimits(num_connections=1)) as (_, writer):
        reader, other = await asyncio.open_connection(*writer.get_extra_info("peername"))
        received = await reader.read()
        other.close()
    assert received.startswith(b"HTTP/1.1 503") and b'"code": 503' in received


async def test_beyond_the_limit_a_new_connection_closes_the_one_that_was_idle_longest() -> None:
    async with connected(ArrivalLimits(num_connections=2)) as (reader, writer):
        address = writer.get_extra_info("peername")
        second_reader, second = await asyncio.open_connection(*address)
        for pair in ((reader, writer), (second_reader, second), (reader, writer)):
            assert (await send_small(*pair)).startswith(b"HTTP/1.1 200")
        third_reader, third = await asyncio.open_connection(*address)
        assert (await send_small(third_reader, third)).startswith(b"HTTP/1.1 200")
        assert await second_reader.read() == b""
        assert (await send_small(reader, writer)).startswith(b"HTTP/1.1 200")
        second.close()
        third.close()


async def test_a_connection_with_an_open_request_is_not_closed_for_a_new_one() -> None:
    finish = asyncio.Event()

    async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            body = await read_body(receive)
            await finish.wait()
            await send_json(send, 200, len(body))

    async with connected(ArrivalLimits(num_connections=1), slow_app) as (reader, writer):
        sending = asyncio.create_task(send_small(reader, writer))
        await asyncio.sleep(0.1)
        other_reader, other = await asyncio.open_connection(*writer.get_extra_info("peername"))
        assert (await other_reader.read()).startswith(b"HTTP/1.1 503")
        other.close()
        finish.set()
        assert (await sending).startswith(b"HTTP/1.1 200")


async def test_beyond_the_limit_a_new_connection_closes_one_that_sent_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fakevllm_runtime.http_protocol.MIN_AGE_S", 0.1)
    async with connected(ArrivalLimits(num_connections=1)) as (reader, writer):
        await asyncio.sleep(0.2)
        other_reader, other = await asyncio.open_connection(*writer.get_extra_info("peername"))
        assert (await send_small(other_reader, other)).startswith(b"HTTP/1.1 200")
        assert await reader.read() == b""
        other.close()


async def test_a_connection_whose_body_follows_its_answer_is_closed_when_it_is_idle() -> None:
    async def early_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await send_json(send, 401, "no key")

    async with connected(None, early_app, keep_alive_s=1) as (reader, writer):
        writer.write(HEAD + b"content-length: 2\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401")
        assert await reader.readexactly(8) == b'"no key"'
        writer.write(b"ab")
        async with asyncio.timeout(30):
            assert await reader.read() == b""


async def test_too_many_unfinished_heads_close_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fakevllm_runtime.http_protocol.MIN_AGE_S", 0.1)
    async with connected(ArrivalLimits(num_unfinished_heads=2)) as (reader, writer):
        writer.write(HEAD)
        await asyncio.sleep(0.2)
        address = writer.get_extra_info("peername")
        others = [await asyncio.open_connection(*address) for _ in range(2)]
        assert (await reader.read()).startswith(b"HTTP/1.1 408")
        for other_reader, other in others:
            other.write(HEAD + b"content-length: 1\r\n\r\nx")
            assert (await other_reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            other.close()


@pytest.mark.parametrize("extra", [b"\r\n", b"GET /v1/next HTTP/1.1\r\nho"])
async def test_bytes_that_follow_a_complete_request_do_not_cut_its_answer_off(extra: bytes) -> None:
    async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            body = await read_body(receive)
            await asyncio.sleep(1)
            await send_json(send, 200, len(body))

    async with connected(QUICK, slow_app) as (reader, writer):
        writer.write(HEAD + b"content-length: 2\r\n\r\nab")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.write(extra)
        received = await reader.readuntil(b"\r\n\r\n")
        assert received.startswith(b"HTTP/1.1 200") and await reader.readexactly(1) == b"2"


async def test_a_failure_in_the_middle_of_a_response_closes_the_connection() -> None:
    async def failing_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise MemoryError

    async with connected(endpoint=failing_app) as (reader, writer):
        writer.write(SMALL)
        received = await reader.read()
    assert received.startswith(b"HTTP/1.1 200") and b"error" not in received
    assert not received.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("callback", ["on_url", "on_header", "on_body"])
async def test_a_request_for_which_there_is_no_memory_gets_a_503_in_vllms_form(
    monkeypatch: pytest.MonkeyPatch, callback: str
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(HttpToolsProtocol, callback, refuse)
    async with connected() as (reader, writer):
        writer.write(SMALL)
        received = await reader.read()
    assert received.startswith(b"HTTP/1.1 503") and b'"code": 503' in received
    assert received.count(b"HTTP/1.1") == 1
