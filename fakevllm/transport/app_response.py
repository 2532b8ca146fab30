"""The response to the app. This module decides when the response starts, sends keep-alives while
the app waits, and ends the response.

The start is delayed for a short time. If an error occurs before the start, the error can be sent
with an HTTP status of its own. After the start, an error can only be sent inside the body. A
response that has started always ends with an answer or an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
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
from fakevllm_adapters.http.receipt_headers import with_group
from fakevllm_adapters.protocol.errors import WireError, bad_request, internal_error

GRACE_S = 1.5
"""Seconds after which a stream is started even if there is no answer data yet. Most permanent
errors are known within this time, and can still be sent as an HTTP status. Some clients retry
without end after an error inside a stream."""
KEEP_ALIVE_EVERY_S = 5.0
"""Seconds without data after which a keep-alive is sent. The least patient client that is known
closes a stream after 300 s without data."""
WHITE_SPACE_AFTER_S = 50.0
"""Seconds after which white space is sent as a keep-alive, before an answer that is not streamed.
The number is below the 60 s timeout of common reverse proxies. It is not much lower, because the
HTTP status is fixed at 200 as soon as white space is sent."""

_EVENT_STREAM: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
_JSON: Headers = [(b"content-type", b"application/json")]
_SPACE = b" "
_NOT_VLLM = bad_request(
    "The model server did not answer as vLLM does: a stream was mixed up with JSON."
)
"""Error for a reply that is streamed although the app wants no stream, or that is not streamed
although the app wants a stream. The error has status 400, so that clients do not retry. A retry
would not help."""


@dataclass(frozen=True, slots=True)
class SentResponse:
    """A complete response of status 200, as it was sent to the app."""

    status: int
    headers: Headers
    body: bytes


class WatchedSend:
    """Wrapper of an ASGI `send`. It records whether the response has started and whether it has
    ended. It also adds the id of the group to the response's headers."""

    def __init__(self, send: Send, group_id: str | None = None) -> None:
        self._send = send
        self._group_id = group_id
        self.is_started = False
        self.is_ended = False

    def __call__(self, message: MutableMapping[str, Any]) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.is_started = True
            message["headers"] = with_group(message["headers"], self._group_id)
        elif message["type"] == "http.response.body":
            self.is_ended = not message.get("more_body", False)
        return self._send(message)


class AppResponse:
    """The one response to a request of an app. Use this object as a context manager. Until the
    block ends, this object sends keep-alives while the app waits for data."""

    def __init__(
        self,
        send: Send,
        adapter: Adapter,
        exchange: Exchange | None,
        *,
        group_id: str | None = None,
        on_stream_started: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        """Create the response. `exchange` is the parsed request, or None if the proxy cannot parse
        the request. For a request that cannot be parsed, the proxy relays the answer of the
        engine's own route for the app's format.

        `group_id` is the id of the request's group (the request with its sampled answers). A
        response header contains this id. If `group_id` is None, the response has no header with the
        group or with the version of the weights.

        `on_stream_started` is called once, after the first part of a streamed answer has been sent.
        Its argument is the answer's id as the engine sent it, or None if the answer has no id.
        """
        self._send = WatchedSend(send, group_id)
        self._adapter = adapter
        self._exchange = exchange
        self._streamed = exchange is not None and exchange.streamed
        self._is_sending = False
        self._last_write_at = 0.0
        self._entered_at = 0.0
        self.has_answer_data = False
        """Whether any part of an answer or an error has been sent. Keep-alives do not count."""
        self.on_stream_started = on_stream_started
        self._keep_alive_timer: asyncio.TimerHandle | None = None
        self._keep_alive_task: asyncio.Task[None] | None = None
        self._is_postponed = False
        self._is_closed = False
        self._headers: Headers = []
        self._answer_chunks: list[bytes] = []
        self._is_error = False
        self._num_chunks_before_disconnect: int | None = None

    @property
    def is_cut_short(self) -> bool:
        """Whether the app disconnected before the whole answer had been sent.

        The value is False if only the final `data: [DONE]` was missing, because the app then has
        the whole answer.
        """
        if self._num_chunks_before_disconnect is None:
            return False
        missed = b"".join(self._answer_chunks[self._num_chunks_before_disconnect :])
        return not self._send.is_ended or missed not in (b"", DONE)

    @property
    def num_answer_chunks(self) -> int:
        """Number of chunks of answer data that have been sent so far."""
        return len(self._answer_chunks)

    @property
    def is_single_chunk(self) -> bool:
        """Whether the answer was sent in at most one chunk."""
        return sum(map(bool, self._answer_chunks)) <= 1

    @property
    def complete_answer(self) -> SentResponse | None:
        """The complete answer, even if the app disconnected before the end. None if the response is
        an error or has not ended."""
        if self._is_error or not self._send.is_ended:
            return None
        return SentResponse(200, self._headers, b"".join(self._answer_chunks))

    @property
    def is_started(self) -> bool:
        """True if the response has started, which means that its HTTP status has been sent."""
        return self._send.is_started

    async def __aenter__(self) -> Self:
        self._entered_at = asyncio.get_running_loop().time()
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
        """Return a wrapper of the app's ASGI `receive` that records when the app disconnects.

        If the app disconnects before the last byte has been sent, `on_disconnect` is called.
        """

        async def watched() -> MutableMapping[str, Any]:
            message = await receive()
            if message["type"] == "http.disconnect" and not self._send.is_ended:
                self._num_chunks_before_disconnect = len(self._answer_chunks)
                on_disconnect()
            return message

        return watched

    # --- answers and errors

    async def answer(self, reply: EngineResponse) -> None:
        """Send `reply` to the app, in the app's format. `reply` is a complete upstream response of
        status 200, and may be a stream of events."""
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
        """Send a body that is already in the app's format, and end the response. If the response
        has started already, `status` and `headers` have no effect. If a stream has started already,
        the body must be an error, and is sent as an error event."""
        self.has_answer_data = True
        self._is_error = status != 200
        if not self.is_started:
            self._is_sending = True
            self._headers, self._answer_chunks = headers, [body]
            return await send_bytes(self._send, status, body, headers)
        if self._streamed and self._exchange is not None:
            body = self._exchange.end_with_error(_parse_error(body))
        await self.write(body, last=True)

    async def send_stored(self, stored: SentResponse) -> None:
        """Send a stored answer to an app that has repeated an earlier request. The answer was
        stored when the earlier request was answered."""
        if not self._streamed:
            return await self.send_body(stored.status, stored.body, stored.headers)
        await self.open(stored.headers)
        await self.write(stored.body, last=True)

    async def refuse(self, error: WireError) -> None:
        """Send an error in the app's format, and end the response. If the response has not started,
        the response gets the error's HTTP status. Otherwise the error is sent as a part of the
        body."""
        self.has_answer_data = self._is_error = True
        if not self.is_started:
            self._is_sending = True
            error_body = self._adapter.refusal(error.status, error.body)
            return await send_error(self._send, replace(error, body=error_body))
        if self._streamed and self._exchange is not None:
            return await self.write(self._exchange.end_with_error(error.body), last=True)
        error_body = self._adapter.refusal(error.status, error.body)
        await self.write(orjson.dumps(error_body), last=True)

    async def open(self, headers: Headers) -> None:
        """Start a response of status 200. If a keep-alive has started the response already, do
        nothing."""
        if not self.is_started:
            self._headers = headers
            await start_stream(self._send, 200, headers)

    async def write(self, chunk: bytes, *, last: bool = False, is_answer: bool = True) -> None:
        """Send a chunk of a response that has started. `is_answer` is False if the chunk is a
        keep-alive."""
        self.has_answer_data = self.has_answer_data or last or (is_answer and bool(chunk))
        if is_answer:
            self._answer_chunks.append(chunk)
        self._is_sending = True
        try:
            if chunk or last:
                await send_chunk(self._send, chunk, last=last)
        finally:
            self._is_sending = last
            self._last_write_at = asyncio.get_running_loop().time()

    async def end_with_error(self, error: WireError) -> None:
        """End the response with `error`. If the response has ended already, do nothing."""
        if not self._send.is_ended:
            await self.refuse(error)

    # --- keep-alives

    def stop_keep_alives(self) -> None:
        """Stop the timer that sends keep-alives."""
        if self._keep_alive_timer is not None:
            self._keep_alive_timer.cancel()

    def postpone_start(self) -> None:
        """Delay the start of a response that has not started. Keep-alives may then start the
        response only when the request is WHITE_SPACE_AFTER_S seconds old.

        Call this method while the request is held for a retry. Before the start, a temporary error
        can be sent as a 503 with `Retry-After`, which makes clients retry by themselves. An error
        inside a stream cannot ask clients to retry.
        """
        if self._exchange is None or self.is_started or self._is_postponed or self._is_closed:
            return
        self.stop_keep_alives()
        self._is_postponed = True
        waited_s = asyncio.get_running_loop().time() - self._entered_at
        self._schedule(max(WHITE_SPACE_AFTER_S - waited_s, 0.0))

    def _schedule(self, delay_s: float) -> None:
        self._keep_alive_timer = asyncio.get_running_loop().call_later(
            delay_s, self.on_keep_alive_due
        )

    def on_keep_alive_due(self) -> None:
        """Send a keep-alive if nothing has been sent for KEEP_ALIVE_EVERY_S seconds, and set the
        timer for the next keep-alive."""
        if self._send.is_ended or self._is_closed:
            return
        loop = asyncio.get_running_loop()
        silent_s = loop.time() - self._last_write_at
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


def _parse_error(body: bytes) -> Json:
    """Return the error object in a response body. If the body contains no error object, return an
    error object for an internal error."""
    error = error_object(body)
    return error if error is not None and "error" in error else internal_error().body
