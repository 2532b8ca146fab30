"""How the app gets its answer: when the response may begin, what keeps it alive, how it ends.

The status line waits a little, so that errors that will not heal reach the app as a status and not
inside a stream. A response that has been begun always ends with an answer or an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import orjson

from fakevllm.transport.engine_client import EngineResponse
from fakevllm_adapters.formats.base import Adapter, Exchange, Json
from fakevllm_adapters.formats.chat import stream_end
from fakevllm_adapters.formats.sse import DONE
from fakevllm_adapters.http.asgi import (
    Headers,
    Receive,
    Send,
    error_object,
    send_bytes,
    send_chunk,
    send_error,
    start_stream,
)
from fakevllm_adapters.protocol.errors import WireError, bad_request, internal_error

GRACE_S = 1.5
"""Clients retry errors inside a stream without end; most permanent ones are known by then."""
KEEP_ALIVE_EVERY_S = 5.0
"""Well below the 300 s after which the strictest client gives up on a stream."""
WHITE_SPACE_AFTER_S = 50.0
"""How long a whole answer leaves the app in silence: below the 60 s of common reverse proxies.
White space before JSON fixes the status at 200, so it comes late."""

_EVENT_STREAM: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
_JSON: Headers = [(b"content-type", b"application/json")]
_SPACE = b" "
_NOT_VLLM = bad_request(
    "The model server did not answer as vLLM does: a stream was mixed up with JSON."
)
"""A 400: clients do not ask again for what does not heal."""


@dataclass(frozen=True, slots=True)
class SentResponse:
    """A whole answer as the app read it, or was to."""

    status: int
    headers: Headers
    body: bytes


class WatchedSend:
    """An ASGI `send` that remembers how far the answer has come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_started = False
        self.is_ended = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
        elif message["type"] == "http.response.body":
            self.is_ended = not message.get("more_body", False)
        await self._send(message)


class AppResponse:
    """Answers the app once. Inside its block the app is kept from giving up."""

    def __init__(
        self,
        send: Send,
        adapter: Adapter,
        exchange: Exchange | None,
        *,
        on_stream_started: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        """`exchange`: None if the engine's own route answers, in a format that the proxy does not
        parse. `on_stream_started`: called with the engine's id of the answer, or None if the answer
        has no id, once the first part of a streamed answer has been sent."""
        self._send = WatchedSend(send)
        self._adapter = adapter
        self._exchange = exchange
        self._streamed = exchange is not None and exchange.streamed
        self._is_sending = False
        self._wrote_at = 0.0
        self._began_at = 0.0
        self.has_answer_data = False
        """Whether the app has got anything of an answer, and not only what keeps it waiting."""
        self.on_stream_started = on_stream_started
        self._keep_alive_timer: asyncio.TimerHandle | None = None
        self._keep_alive_task: asyncio.Task[None] | None = None
        self._is_held = False
        self._is_closed = False
        self._headers: Headers = []
        self._said: list[bytes] = []
        self._is_trouble = False
        self._num_said_before_it_left: int | None = None

    @property
    def is_cut_short(self) -> bool:
        """Whether the app was seen to leave before it had all that it was told. Some clients hang
        up at the event that ends an answer, before the last byte."""
        if self._num_said_before_it_left is None:
            return False
        missed = b"".join(self._said[self._num_said_before_it_left :])
        return not self._send.is_ended or missed not in (b"", DONE)

    @property
    def num_answer_chunks(self) -> int:
        """Pieces of an answer so far."""
        return len(self._said)

    @property
    def is_single_chunk(self) -> bool:
        """Whether the answer went out at once, and not as it came."""
        return sum(map(bool, self._said)) <= 1

    @property
    def complete_answer(self) -> SentResponse | None:
        """All that the app got, where that was an answer to its end; whether it was still there
        to get it or not."""
        if self._is_trouble or not self._send.is_ended:
            return None
        return SentResponse(200, self._headers, b"".join(self._said))

    @property
    def is_started(self) -> bool:
        return self._send.is_started

    async def __aenter__(self) -> Self:
        self._began_at = asyncio.get_running_loop().time()
        if self._exchange is not None:
            self._schedule(GRACE_S if self._streamed else WHITE_SPACE_AFTER_S)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.stop_keep_alives()
        self._is_closed = True
        if self._keep_alive_task is not None and not self._keep_alive_task.done():
            self._keep_alive_task.cancel()
            await asyncio.wait({self._keep_alive_task})

    def watching(
        self, receive: Receive, on_disconnect: Callable[[], None] = lambda: None
    ) -> Receive:
        """The app's `receive`; whoever awaits it learns when the app leaves, and so does this.
        `on_disconnect`: called where that is before the last byte is out."""

        async def watched() -> MutableMapping[str, Any]:
            message = await receive()
            if message["type"] == "http.disconnect" and not self._send.is_ended:
                self._num_said_before_it_left = len(self._said)
                on_disconnect()
            return message

        return watched

    # --- what the app gets

    async def answer(self, reply: EngineResponse) -> None:
        """A whole 200 answer of the upstream, streamed or not."""
        assert self._exchange is not None
        if reply.streamed != self._streamed:
            return await self.refuse(_NOT_VLLM)
        if reply.streamed:
            events = reply.events
            shown = b"".join(map(self._exchange.event, events))
            if DONE not in events:
                shown += stream_end(self._exchange, events)
            await self.open(reply.headers)
            return await self.write(shown, last=True)
        try:
            shown = self._exchange.answer(reply.body)
        except ValueError:
            return await self.refuse(internal_error())
        await self.send_body(reply.status, shown, reply.headers)

    async def send_body(self, status: int, body: bytes, headers: Headers) -> None:
        """One body in the app's format, with its status where that is still open."""
        self.has_answer_data = True
        self._is_trouble = status != 200
        if not self.is_started:
            self._is_sending = True
            self._headers, self._said = headers, [body]
            return await send_bytes(self._send, status, body, headers)
        if self._streamed and self._exchange is not None:
            body = self._exchange.end_with_error(_error_in(body))
        await self.write(body, last=True)

    async def send_stored(self, answered: SentResponse) -> None:
        """The answer that an earlier app was to get for the same request."""
        if not self._streamed:
            return await self.send_body(answered.status, answered.body, answered.headers)
        await self.open(answered.headers)
        await self.write(answered.body, last=True)

    async def refuse(self, error: WireError) -> None:
        self.has_answer_data = self._is_trouble = True
        if not self.is_started:
            self._is_sending = True
            worded = self._adapter.refusal(error.status, error.body)
            return await send_error(self._send, replace(error, body=worded))
        if self._streamed and self._exchange is not None:
            return await self.write(self._exchange.end_with_error(error.body), last=True)
        worded = self._adapter.refusal(error.status, error.body)
        await self.write(orjson.dumps(worded), last=True)

    async def open(self, headers: Headers) -> None:
        """Begins a stream, where it has not been begun to keep the app waiting."""
        if not self.is_started:
            self._headers = headers
            await start_stream(self._send, 200, headers)

    async def write(self, chunk: bytes, *, last: bool = False, is_answer: bool = True) -> None:
        """`is_answer`: whether it is any of an answer, and not only what keeps the app waiting."""
        self.has_answer_data = self.has_answer_data or last or (is_answer and bool(chunk))
        if is_answer:
            self._said.append(chunk)
        self._is_sending = True
        try:
            if chunk or last:
                await send_chunk(self._send, chunk, last=last)
        finally:
            self._is_sending = last
            self._wrote_at = asyncio.get_running_loop().time()

    async def end_with_error(self, error: WireError) -> None:
        """An answer that has not ended ends with `error`; what has ended stays as it is."""
        if not self._send.is_ended:
            await self.refuse(error)

    # --- what keeps it waiting

    def stop_keep_alives(self) -> None:
        """From now on nothing is sent but what the caller sends."""
        if self._keep_alive_timer is not None:
            self._keep_alive_timer.cancel()

    def postpone_start(self) -> None:
        """What has not begun waits for a while: an error that clients get as a status they ask
        again for by themselves, and none that comes inside a stream."""
        if self._exchange is None or self.is_started or self._is_held or self._is_closed:
            return
        self.stop_keep_alives()
        self._is_held = True
        waited_s = asyncio.get_running_loop().time() - self._began_at
        self._schedule(max(WHITE_SPACE_AFTER_S - waited_s, 0.0))

    def _schedule(self, delay_s: float) -> None:
        self._keep_alive_timer = asyncio.get_running_loop().call_later(
            delay_s, self.on_keep_alive_due
        )

    def on_keep_alive_due(self) -> None:
        """Says something where nothing was said for a while."""
        if self._send.is_ended or self._is_closed:
            return
        loop = asyncio.get_running_loop()
        silent_s = loop.time() - self._wrote_at
        if silent_s >= KEEP_ALIVE_EVERY_S:
            silent_s = 0.0
            self._keep_alive_task = loop.create_task(self._keep_alive())
        self._schedule(KEEP_ALIVE_EVERY_S - silent_s)

    async def _keep_alive(self) -> None:
        if self._is_sending or self._send.is_ended:
            return
        assert self._exchange is not None
        shown = self._exchange.keep_alive() if self._streamed else _SPACE
        await self.open(_EVENT_STREAM if self._streamed else _JSON)
        await self.write(shown, is_answer=False)


def _error_in(body: bytes) -> Json:
    """The error body of vLLM's in a refusal's bytes."""
    found = error_object(body)
    return found if found is not None and "error" in found else internal_error().body
