"""The app's side of one request: when to open its stream, how to keep it alive, how to end it.

The status line waits a little, so that errors that will not heal reach the app as a status and not
inside a stream.
A stream that has been opened always ends with an answer or an error, and with `[DONE]`.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import orjson

from fakevllm.upstream import Reply
from fakevllm_adapters.asgi import Headers, Send, send_bytes, send_chunk, send_error, start_stream
from fakevllm_adapters.errors import WireError
from fakevllm_adapters.sse import DONE, KEEP_ALIVE

T = TypeVar("T")

GRACE_S = 1.5
"""Clients retry errors inside a stream without end; most permanent ones are known by then."""
KEEP_ALIVE_EVERY_S = 5.0
"""Well below the 300 s after which the strictest client gives up."""

_EVENT_STREAM: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]


class AppReply:
    """Answers the app once."""

    def __init__(self, send: Send, *, streamed: bool) -> None:
        self._send = send
        self._streamed = streamed
        self._opened = False

    async def wait_for(self, work: asyncio.Task[T]) -> T:
        """The result of `work`; a streaming app hears from us meanwhile."""
        timeout = GRACE_S
        while self._streamed and not (await asyncio.wait({work}, timeout=timeout))[0]:
            timeout = KEEP_ALIVE_EVERY_S
            if not self._opened:
                self._opened = True
                await start_stream(self._send, 200, _EVENT_STREAM)
            await send_chunk(self._send, KEEP_ALIVE)
        return await work

    async def answer(self, reply: Reply) -> None:
        if not self._opened:
            await send_bytes(self._send, reply.status, reply.body, reply.headers)
        elif reply.streamed:
            await send_chunk(self._send, reply.body, last=True)
        else:
            await self._end_with(reply.body)

    async def refuse(self, error: WireError) -> None:
        if not self._opened:
            await send_error(self._send, error)
        else:
            await self._end_with(orjson.dumps(error.body))

    async def _end_with(self, error: bytes) -> None:
        await send_chunk(self._send, b"data: " + error.strip() + b"\n\n" + DONE, last=True)
