"""An upstream server whose responses are bytes that a test chooses, including head and framing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from pydantic import BaseModel

from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply, LogReply

STATUS = EngineStatusReply(
    engine_status=EngineStatus.ROLLING, server_id="s", run_id="r", model="fake", global_step=1
)


def http(body: bytes, head: bytes = b"", status: bytes = b"200 OK") -> bytes:
    """Return a well-framed HTTP response."""
    head = head or b"Content-Type: application/json"
    return b"HTTP/1.1 %s\r\n%s\r\nContent-Length: %d\r\n\r\n%s" % (status, head, len(body), body)


def _json(reply: BaseModel) -> bytes:
    return http(reply.model_dump_json().encode())


class OddUpstream:
    """A server that gives valid responses to a proxy's link, and `answer` to all other requests.

    Each connection gets one response.
    """

    def __init__(self) -> None:
        self.answer: Sequence[bytes] = [http(b"{}")]
        """Pieces of the response, written one after another."""
        self.valid = {
            b"/get_engine_status": _json(STATUS),
            b"/get_train_config": http(b"null"),
            b"/get_run_log": _json(LogReply(entries=[])),
            b"/version": http(b'{"version":"0"}'),
            b"/health": http(b""),
            b"/end_group": http(b'{"success":true}'),
            b"/abort_group": http(b'{"success":true}'),
        }
        self.url = ""
        self.num_requests = 0
        self.calls: list[tuple[bytes, bytes]] = []
        """Head and body of each request that is not for the link."""
        self.is_silent = False
        """Whether the server sends no response and waits for the client's disconnect."""
        self.has_request, self.has_disconnect = asyncio.Event(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncGenerator[OddUpstream]:
        """Listen on a free port until the block ends."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()[:2]
            self.url = f"http://{host}:{port}"
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].split(b"?")[0]
            lengths = [line for line in head.lower().split(b"\r\n") if b"content-length:" in line]
            body = await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
            self.num_requests += 1
            valid = self.valid.get(path)
            if valid is None:
                self.calls.append((head, body))
            if self.is_silent and valid is None:
                self.has_request.set()
                await reader.read()
                self.has_disconnect.set()
            for piece in [valid] if valid is not None else self.answer:
                writer.write(piece)
                await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
