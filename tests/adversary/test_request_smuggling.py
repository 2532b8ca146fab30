"""Requests whose end two programs may see at different bytes, sent to a real socket.

Behind a load balancer, such a request hides a second request, which the load balancer does not
check. A request that can be read in two ways is refused with a 400, and the connection is closed. A
request that is only unusual is answered once, and the bytes that follow it are the next request.

Each case is sent together with a marked last request, which closes the connection. The statuses of
all answers on the connection show how the bytes were divided.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Generator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.fuzz.in_process_stack import Stack, no_traceback, proxy_over, running
from tests.fuzz.odd_upstream import OddUpstream

BODY = b'{"model":"fake","messages":[{"role":"user","content":"[[say hi]]"}]}'
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
LAST = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
"""The request after the attack. It gets a 404 if the server reads it as a request."""
HIDDEN = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
"""A request in a body. It gets a 200 if the server reads it as a request of its own."""
H2C = (b"Connection: Upgrade, HTTP2-Settings\r\n", b"Upgrade: h2c\r\n", b"HTTP2-Settings: AAMA\r\n")
"""The headers with which Java's HTTP client offers to switch to HTTP/2. The client sends them with
each request."""
LIMIT_S = 10.0
NUM_TURNS = 4
"""Number of turns of the event loop in which the server, which runs in the same loop, reads and
answers a piece. After a refusal the client must stop, because bytes that arrive at a closed
connection reset the connection, and the refusal is lost."""

REFUSED = [400]
ANSWERED = [200, 404]


def chunks(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + end


def post(*headers: bytes, body: bytes = BODY) -> bytes:
    return POST + JSON + b"".join(headers) + b"\r\n" + body


CASES: dict[str, tuple[bytes, list[int]]] = {
    # two lengths
    "a length and a transfer encoding": (post(LENGTH, CHUNKED, body=chunks(BODY)), REFUSED),
    "a transfer encoding and a length": (post(CHUNKED, LENGTH, body=chunks(BODY)), REFUSED),
    "a length that ends before the chunks, with a request in the rest": (
        post(b"Content-Length: 4\r\n", CHUNKED, body=chunks(BODY) + HIDDEN),
        REFUSED,
    ),
    "chunks that end before the length, with a request in the rest": (
        post(b"Content-Length: 99\r\n", CHUNKED, body=b"0\r\n\r\n" + HIDDEN),
        REFUSED,
    ),
    "two different lengths": (post(LENGTH, b"Content-Length: 5\r\n"), REFUSED),
    "two equal lengths": (post(LENGTH, LENGTH), REFUSED),
    "two lengths in one header": (post(b"Content-Length: 68, 5\r\n"), REFUSED),
    # lengths that are no numbers
    "a negative length": (post(b"Content-Length: -1\r\n"), REFUSED),
    "a length with a plus sign": (post(b"Content-Length: +%d\r\n" % len(BODY)), REFUSED),
    "a hexadecimal length": (post(b"Content-Length: 0x44\r\n"), REFUSED),
    "a length with a space inside": (post(b"Content-Length: 6 8\r\n"), REFUSED),
    "an empty length": (post(b"Content-Length: \r\n"), REFUSED),
    "a length beyond 64 bits": (post(b"Content-Length: %d\r\n" % 2**64), REFUSED),
    "a length that wraps around at 64 bits": (
        post(b"Content-Length: %d\r\n" % (2**64 + len(BODY))),
        REFUSED,
    ),
    "a length with leading zeros": (post(b"Content-Length: %05d\r\n" % len(BODY)), ANSWERED),
    # names that another program may read differently
    "a space before the colon of the length": (
        post(b"Content-Length : %d\r\n" % len(BODY)),
        REFUSED,
    ),
    "a space before the colon of the encoding": (
        post(LENGTH, b"Transfer-Encoding : chunked\r\n"),
        REFUSED,
    ),
    "a space before the name": (post(LENGTH, b" Transfer-Encoding: chunked\r\n"), REFUSED),
    "a tab before the name of the first header": (
        b"POST /v1/chat/completions HTTP/1.1\r\n\tHost: localhost\r\n" + LENGTH + b"\r\n" + BODY,
        REFUSED,
    ),
    "a name with a NUL": (post(LENGTH, b"Transfer\0-Encoding: chunked\r\n"), REFUSED),
    "a value with a NUL": (post(LENGTH, b"X-A: a\0b\r\n"), REFUSED),
    "a header without a colon": (post(LENGTH, b"Transfer-Encoding chunked\r\n"), REFUSED),
    "a header without a name": (post(LENGTH, b": chunked\r\n"), REFUSED),
    "a value that continues on the next line": (
        post(LENGTH, b"X-A: b\r\n Transfer-Encoding: chunked\r\n"),
        REFUSED,
    ),
    "an encoding on a continued line": (
        post(LENGTH, b"Transfer-Encoding:\r\n chunked\r\n", body=chunks(BODY)),
        REFUSED,
    ),
    # transfer encodings
    "an unknown transfer encoding": (post(b"Transfer-Encoding: xchunked\r\n"), REFUSED),
    "an encoding after chunked": (
        post(b"Transfer-Encoding: chunked, identity\r\n", body=chunks(BODY)),
        REFUSED,
    ),
    "two encodings in two headers": (
        post(CHUNKED, b"Transfer-Encoding: identity\r\n", body=chunks(BODY)),
        REFUSED,
    ),
    "an encoding with a vertical tab": (
        post(LENGTH, b"Transfer-Encoding: \x0bchunked\r\n"),
        REFUSED,
    ),
    "a quoted encoding": (post(LENGTH, b'Transfer-Encoding: "chunked"\r\n'), REFUSED),
    "an encoding in capitals": (
        post(b"TRANSFER-ENCODING: CHUNKED\r\n", body=chunks(BODY)),
        ANSWERED,
    ),
    # chunks
    "chunks": (post(CHUNKED, body=chunks(BODY[:9], BODY[9:])), ANSWERED),
    "chunks with extensions": (
        post(CHUNKED, body=b'%x;a=b;c="d"\r\n%s\r\n0;e\r\n\r\n' % (len(BODY), BODY)),
        ANSWERED,
    ),
    "chunks with trailers that are headers elsewhere": (
        post(CHUNKED, body=chunks(BODY, end=b"0\r\nHost: evil.example\r\nX-A: b\r\n\r\n")),
        ANSWERED,
    ),
    "a length in the trailers": (
        post(CHUNKED, body=chunks(BODY, end=b"0\r\nContent-Length: 5\r\n\r\n")),
        REFUSED,
    ),
    "an upgrade in the trailers": (
        post(CHUNKED, body=chunks(BODY, end=b"0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")),
        ANSWERED,
    ),
    "a chunk extension that ends with a bare line feed": (
        post(CHUNKED, body=b"%x;a\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)),
        REFUSED,
    ),
    "a chunk of a negative size": (post(CHUNKED, body=b"-1\r\n" + BODY), REFUSED),
    "a chunk size with a prefix": (
        post(CHUNKED, body=b"0x%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)),
        REFUSED,
    ),
    "a chunk size beyond 64 bits": (post(CHUNKED, body=b"1" + b"0" * 16 + b"\r\n"), REFUSED),
    "a chunk that is longer than its size": (
        post(CHUNKED, body=b"5\r\n%s\r\n0\r\n\r\n" % BODY),
        REFUSED,
    ),
    "a chunk without a size": (post(CHUNKED, body=b"\r\n" + BODY), REFUSED),
    # line ends
    "line feeds without carriage returns": (
        post(LENGTH).replace(b"\r\n", b"\n").replace(b"\n\n", b"\n\n", 1),
        REFUSED,
    ),
    "a header after a bare line feed": (
        post(LENGTH, b"X-A: b\nTransfer-Encoding: chunked\r\n"),
        REFUSED,
    ),
    "a header after a bare carriage return": (
        post(LENGTH, b"X-A: b\rTransfer-Encoding: chunked\r\n"),
        REFUSED,
    ),
    "empty lines before the request": (b"\r\n\r\n" + post(LENGTH), ANSWERED),
    # the request line and the target
    "two spaces in the request line": (post(LENGTH).replace(b" HTTP", b"  HTTP", 1), ANSWERED),
    "a target with a space": (post(LENGTH).replace(b"/v1", b"/a /v1", 1), REFUSED),
    "a target with a NUL": (post(LENGTH).replace(b"/v1", b"/\0v1", 1), REFUSED),
    "a request without a version": (b"POST /v1/chat/completions\r\n\r\n", [403]),
    "HTTP/2 without an upgrade": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", REFUSED),
    "the absolute URL of another host in place of the path": (
        post(LENGTH).replace(b" /v1", b" http://evil.example/v1", 1),
        ANSWERED,
    ),
    "the absolute URL of a served host with another host": (
        post(LENGTH)
        .replace(b" /v1", b" http://localhost/v1", 1)
        .replace(b"Host: localhost", b"Host: evil.example", 1),
        [403, 404],
    ),
    "a CONNECT request": (
        b"CONNECT 10.0.0.1:22 HTTP/1.1\r\nHost: localhost\r\n\r\n" + HIDDEN,
        REFUSED,
    ),
    "two hosts": (post(LENGTH, b"Host: evil.example\r\n"), [400, 404]),
    "no host": (post(LENGTH).replace(b"Host: localhost\r\n", b"", 1), [403, 404]),
    # requests inside bodies, and bodies of requests that have none
    "a request inside a body": (
        post(b"Content-Length: %d\r\n" % len(HIDDEN), body=HIDDEN),
        [400, 404],
    ),
    "a GET with a body": (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(HIDDEN)
        + HIDDEN,
        ANSWERED,
    ),
    "a GET with chunks": (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + CHUNKED + b"\r\n" + chunks(HIDDEN),
        ANSWERED,
    ),
    "a refused request with a body": (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: evil.example\r\nContent-Length: %d\r\n\r\n"
        % len(HIDDEN)
        + HIDDEN,
        [403, 404],
    ),
    "a request to upgrade to HTTP/2": (post(LENGTH, *H2C), ANSWERED),
    "a request to upgrade to HTTP/2 with chunks": (
        post(CHUNKED, *H2C, body=chunks(BODY)),
        ANSWERED,
    ),
    "a request to upgrade to HTTP/2 with a request in its body": (
        post(b"Content-Length: %d\r\n" % len(HIDDEN), *H2C, body=HIDDEN),
        [400, 404],
    ),
    "a request to upgrade to HTTP/2 with two lengths": (
        post(LENGTH, b"Content-Length: 5\r\n", *H2C),
        REFUSED,
    ),
    "three requests to upgrade to HTTP/2": (post(LENGTH, *H2C) * 3, [200, 200, 200, 404]),
    "a request to upgrade to a websocket": (
        post(LENGTH, b"Connection: Upgrade\r\n", b"Upgrade: websocket\r\n"),
        ANSWERED,
    ),
    "a request that waits for 100 Continue": (
        post(LENGTH, b"Expect: 100-continue\r\n"),
        [100, 200, 404],
    ),
}


@pytest.fixture(scope="module")
def loop() -> Generator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def stack(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Generator[Stack]:
    opened = AsyncExitStack()
    yield loop.run(opened.enter_async_context(running(tmp_path_factory.mktemp("stack"))))
    loop.run(opened.aclose())


async def statuses(url: str, raw: bytes, piece_bytes: int) -> list[int]:
    """Send bytes on one connection in pieces, and return the status of each answer on it."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    received = bytearray()

    async def receive() -> None:
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(2**16):
                received.extend(part)

    async with asyncio.timeout(LIMIT_S):
        receiving = asyncio.create_task(receive())
        for start in range(0, len(raw), piece_bytes):
            if reader.at_eof() or receiving.done():
                break
            writer.write(raw[start : start + piece_bytes])
            for _ in range(NUM_TURNS):
                await asyncio.sleep(0)
        await receiving
    writer.close()
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", received)]


@pytest.mark.parametrize("piece_bytes", [2**20, 7], ids=["whole", "in pieces"])
@pytest.mark.parametrize("part", ["server", "proxy"])
@pytest.mark.parametrize("name", CASES)
def test_a_request_of_two_readings_is_refused_and_an_unusual_one_answered_once(
    loop: asyncio.Runner, stack: Stack, part: str, name: str, piece_bytes: int
) -> None:
    raw, expected = CASES[name]
    with no_traceback():
        assert loop.run(statuses(getattr(stack, part), raw + LAST, piece_bytes)) == expected


FOREIGN_HEADERS = (
    b"X-Fakevllm-Sibling: g/0\r\n",
    b"X-Fakevllm-Reason: engine_failed\r\n",
    b"X-Api-Key: sk-app\r\n",
    b"X-Forwarded-Host: evil.example\r\n",
    b"Cookie: a=b\r\n",
    b"Te: trailers\r\n",
    b"Trailer: X-A\r\n",
    b"Content-Encoding: identity\r\n",
    b"Connection: X-Fakevllm-Sibling, Content-Length\r\n",
    b"Expect: 100-continue\r\n",
    *H2C,
)
KNOWN_HEADERS = {b"host", b"via", b"content-type", b"content-length", b"x-request-id"}


@pytest.mark.parametrize("framing", [LENGTH, CHUNKED], ids=["with a length", "with chunks"])
def test_the_server_gets_one_plain_request_without_the_headers_of_the_app(
    loop: asyncio.Runner, tmp_path: Path, framing: bytes
) -> None:
    body = BODY if framing == LENGTH else chunks(BODY[:5], BODY[5:], end=b"0\r\nX-A: b\r\n\r\n")
    raw = post(framing, b"X-Request-Id: a1\r\n", *FOREIGN_HEADERS, body=body)

    async def received_calls() -> list[tuple[bytes, bytes]]:
        async with OddUpstream().listening() as upstream, proxy_over(tmp_path, upstream.url) as url:
            await statuses(url, raw + LAST, 2**20)
            return [call for call in upstream.calls if call[0].startswith(b"POST ")]

    ((head, received),) = loop.run(received_calls())
    lines = head.rstrip().split(b"\r\n")
    assert lines[0] == b"POST /v1/chat/completions HTTP/1.1"
    names = [line.partition(b":")[0].lower() for line in lines[1:]]
    assert len(names) == len(set(names)) and set(names) == KNOWN_HEADERS
    assert b"X-Request-Id: a1" in lines and received == BODY
