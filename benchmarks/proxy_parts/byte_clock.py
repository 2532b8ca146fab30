"""A forwarder of TCP connections between proxy and server. It records when it last passed on a byte
of an answer.

    python -m benchmarks.proxy_parts.byte_clock --upstream http://127.0.0.1:10086 --port 8001

`GET /last_byte` returns the moment of the last byte of any answer to a chat request, in seconds of
time.perf_counter(), which on Linux is the same clock in all processes. The forwarder does not
decode answers. The first line of the latest request on a connection decides whether the server's
bytes on this connection belong to an answer.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast
from urllib.parse import urlsplit

import uvloop

from benchmarks.proxy_parts.helper_process import parse_arguments

_CHAT = b"POST /v1/chat/completions "
_METHODS = (b"GET ", b"POST ")
_LAST_BYTE = b"GET /last_byte "


class ByteClock:
    """The time at which the latest byte of an answer was passed on."""

    def __init__(self) -> None:
        self.last_byte = 0.0


class AppSide(asyncio.Protocol):
    """Connection of the proxy to the forwarder."""

    def __init__(self, clock: ByteClock, host: str, port: int) -> None:
        self._clock = clock
        self._address = host, port
        self.transport: asyncio.Transport | None = None
        self._server: asyncio.Transport | None = None
        self._early: list[bytes] = []
        """Bytes that arrived before the connection to the server was open."""
        self._opening: asyncio.Task[None] | None = None
        self.is_chat = False
        """Whether the latest request on this connection is a chat request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class has another base

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        if data.startswith(_LAST_BYTE):
            body = f"{self._clock.last_byte:.9f}".encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            self.transport.write(head + body)
            return
        if data.startswith(_METHODS):
            self.is_chat = data.startswith(_CHAT)
        if self._server is not None:
            self._server.write(data)
            return
        self._early.append(data)
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(
            lambda: ServerSide(self._clock, self), *self._address
        )
        self._server = transport
        transport.write(b"".join(self._early))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._server is not None:
            self._server.close()


class ServerSide(asyncio.Protocol):
    """Connection of the forwarder to the server."""

    def __init__(self, clock: ByteClock, app_side: AppSide) -> None:
        self._clock = clock
        self._app_side = app_side

    def data_received(self, data: bytes) -> None:
        assert self._app_side.transport is not None
        if self._app_side.is_chat:
            # Before the write: on a busy machine, the app may have its answer before this process
            # runs again.
            self._clock.last_byte = time.perf_counter()
        self._app_side.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._app_side.transport is not None:
            self._app_side.transport.close()


async def serve(upstream: str, port: int) -> None:
    """Forward connections until the process ends."""
    address = urlsplit(upstream)
    assert address.hostname is not None and address.port is not None, upstream
    host, upstream_port = address.hostname, address.port
    clock = ByteClock()
    server = await asyncio.get_running_loop().create_server(
        lambda: AppSide(clock, host, upstream_port), "127.0.0.1", port
    )
    await server.serve_forever()


def main() -> None:
    args = parse_arguments((__doc__ or "").partition("\n\n")[0])
    uvloop.run(serve(args.upstream, args.port))


if __name__ == "__main__":
    main()
