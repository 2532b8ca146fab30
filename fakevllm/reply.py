"""The app's side of one request: when to open its stream, how to keep it alive, how to end it.

The status line waits a little, so that errors that will not heal reach the app as a status and not
inside a stream.
A stream that has been opened always ends with an answer or an error, and with `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any, TypeVar

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


class WatchedSend:
    """An ASGI `send` that remembers how far the answer has come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_begun = False
        self._is_streamed = False
        self._is_ended = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._is_begun = True
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_streamed = kind.startswith(b"text/event-stream")
        elif message["type"] == "http.response.body":
            self._is_ended = not message.get("more_body", False)
        await self._send(message)

    async def break_off(self, error: WireError) -> None:
        """An answer that has not ended ends with `error`; what has ended stays as it is."""
        if not self._is_begun:
            await send_error(self, error)
        elif not self._is_ended:
            end = b"data: " + orjson.dumps(error.body) + b"\n\n" + DONE
            await send_chunk(self, end if self._is_streamed else b"", last=True)


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
