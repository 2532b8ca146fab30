"""HTTP client with which the server forwards model calls to its rollout engine.

`EngineClient.relay` forwards a call without recording it. `EngineClient.capture` also records the
call's tokens for training.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson

from fakevllm_adapters.formats.base import EngineInfo, Exchange
from fakevllm_adapters.formats.chat import stream_end
from fakevllm_adapters.formats.sse import DONE, SseDecoder, encode, parse_event
from fakevllm_adapters.http.answer_parts import MEDIA_TYPE, AnswerPart, PartEncoder
from fakevllm_adapters.http.asgi import (
    Headers,
    Send,
    error_object,
    is_final_status,
    reason_headers,
    relayed_headers,
    send_bytes,
    send_chunk,
    start_stream,
)
from fakevllm_adapters.http.complete_choices import CHOICES_HEADER
from fakevllm_adapters.http.receipt_headers import version_headers
from fakevllm_adapters.protocol.errors import WireError, internal_error
from fakevllm_adapters.protocol.outage_reasons import (
    REASON_HEADER,
    OutageReason,
    reason_from_header,
)
from fakevllm_adapters.protocol.separate_prompts import ASKED, PROMPTS_HEADER, parse_sizes
from fakevllm_server.rollout.adapter_name import AdapterName
from fakevllm_server.rollout.capture.answer_forms import AnswerForms
from fakevllm_server.rollout.capture.base import CallCapture
from fakevllm_server.rollout.capture.choice_events import EngineStreamError
from fakevllm_server.rollout.capture.shared_call import (
    CannotShare,
    CompleteChoice,
    EndedChoice,
    SharedCapture,
)
from fakevllm_server.types.backend import Endpoint
from fakevllm_server.types.number_arrays import ids_from_bytes

Json = dict[str, Any]

CALL_TIMEOUT_S = 3600
HEALTH_TIMEOUT_S = 5
IDLE_CONNECTION_S = 3
"""Seconds that an idle connection is kept. vLLM closes idle connections after five seconds. A
shorter time avoids sending a request on a connection that vLLM is closing."""
MIN_THREAD_BYTES = 100_000
"""If the events of some answers have at least this size in bytes, the answers are put together in a
worker thread. On the event loop, this work would take about 5 ms."""
log = logging.getLogger("fakevllm.server")

BAD_REQUEST = 400
_EVENT_STREAM = "text/event-stream"
_JSON: Headers = [(b"content-type", b"application/json")]
_STREAM: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
ErrorPredicate = Callable[[int, Json], bool]
"""A function that decides from an engine's HTTP status and error body whether `Refused` is raised.
If not, the error is sent to the client."""
_FAILURE_STATUSES = (500, 502, 503)
"""Statuses that a dying engine sends. A healthy engine may send them too."""
_REASON_OF_STATUS = {
    429: OutageReason.ENGINE_BUSY,
    502: OutageReason.ENGINE_FAILED,
    503: OutageReason.ENGINE_BUSY,
    504: OutageReason.ENGINE_FAILED,
}
"""Reason of an engine's error by HTTP status, for engines that do not send a reason, such as
vLLM."""


class EngineFailed(Exception):
    """Error for a call that the engine did not answer. Nothing was sent to the client, so the call
    may be retried."""


class NotWritable(Exception):
    """Error for a request body that cannot be written as JSON. The body has integers beyond 64
    bits. Nothing was sent to the engine."""


class Refused(Exception):
    """Error for a call that the engine answered with an HTTP error. Nothing was sent to the client
    yet, so the caller decides what the client gets."""

    def __init__(self, status: int, raw: bytes, headers: Headers) -> None:
        super().__init__(f"{status}: {raw[:200]!r}")
        self.status = status
        self.raw = raw
        self.headers = headers

    @property
    def body(self) -> Json:
        """The engine's JSON error object, or an internal server error if the engine did not send
        one."""
        return error_object(self.raw) or internal_error().body


class _Response(aiohttp.ClientResponse):
    """An HTTP response of the engine, with the LoRA adapter that sampled it, if any."""

    adapter_name: AdapterName | None = None
    """The adapter that sampled the response, with its name and the model name that apps know. None
    if the request was not sent to an adapter."""


@dataclass
class _ConnectionUse:
    """A record of whether one request was sent on a reused connection."""

    is_reused: bool = False


async def _note_reuse(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    if isinstance(context.trace_request_ctx, _ConnectionUse):
        context.trace_request_ctx.is_reused = True


class EngineClient:
    """HTTP client with which the server calls one rollout engine."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._http = _session(endpoint, is_pooled=True)
        self._unpooled = _session(endpoint, is_pooled=False)
        """A session that opens a new connection for each request. vLLM closes a connection without
        an announcement after an error 500, so that a request on a pooled connection may fail
        although the engine is healthy."""
        self._responses: set[aiohttp.ClientResponse] = set()
        """Responses that are being read."""
        self._version: str | None = None
        self.forms = AnswerForms()
        """The forms of the engine's answers (names and order of the fields). The answers that are
        put together for shared calls get these forms."""

    async def close(self) -> None:
        """Close all connections. Calls that are being answered fail at once."""
        for response in self._responses:
            # If aiohttp closes a connection, whoever waits for more of its body waits for ever.
            response.content.set_exception(aiohttp.ClientConnectionError("the engine was stopped"))
        await self._unpooled.close()
        await self._http.close()

    @property
    def info(self) -> EngineInfo:
        """Model name, context length and software version of the engine. The version is None until
        `fetch_version` has succeeded."""
        return EngineInfo(self.endpoint.model_name, self.endpoint.max_model_len, self._version)

    async def fetch_version(self) -> None:
        """Fetch the engine's software version for `info`. If the request fails, the version is
        None."""
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        try:
            async with self._http.get("/version", timeout=timeout) as response:
                self._version = str((await response.json())["version"])
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            self._version = None
        self.forms = AnswerForms(self._version)

    async def is_healthy(self) -> bool:
        """Return True if the engine can answer calls: if it answers `/health` with a status below
        500."""
        if self._unpooled.closed:
            return False
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        try:
            async with self._unpooled.get("/health", timeout=timeout) as response:
                return response.status < 500
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def fetch_metrics(self) -> bytes | None:
        """Return the engine's Prometheus metrics. Return None if the engine does not send them."""
        if self._unpooled.closed:
            return None
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        try:
            async with self._unpooled.get("/metrics", timeout=timeout) as response:
                return await response.read() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def relay(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        send: Send,
        raises_refused: ErrorPredicate | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """Forward a call to the engine and send the engine's answer to the client.

        `exchange` translates the answer into the client's format. Without `exchange`, the answer is
        sent unchanged. `raises_refused` is a function. If it returns True for an error response of
        the engine, Refused is raised. Other error responses are sent to the client. Raises
        EngineFailed if the engine fails before anything was sent to the client.
        """
        async with self._send_raw(method, path, body, headers) as response:
            await self._relay(response, send, raises_refused, exchange)

    async def capture(
        self,
        path: str,
        capture: CallCapture,
        headers: dict[str, str],
        send: Send,
        on_finished: Callable[[], Awaitable[None]],
        raises_refused: ErrorPredicate | None = None,
        exchange: Exchange | None = None,
        plain: Callable[[], bytes] | None = None,
    ) -> None:
        """Forward a call to the engine, record its tokens, and send the answer to the client.

        To get the tokens, additional fields are put into the request. If an answer field is there
        only because of these additional fields, the client does not see it. `on_finished` runs
        before the last byte is sent. Therefore the call is recorded before the client sees the end
        of the answer. `exchange` and `raises_refused` have the same meaning as for `relay`, and the
        same errors are raised.

        `plain` returns the request body without the additional fields. If the engine refuses the
        body with these fields (status 400), the plain body is sent instead. If the engine answers
        the plain body, the call is recorded as untrainable. Raises NotWritable if the body cannot
        be written as JSON.
        """
        is_asked = self.endpoint.is_bundled and capture.hides_prompt_ids
        asking = headers | {PROMPTS_HEADER: ASKED} if is_asked else headers
        async with self._send(path, capture.upstream_body(), asking) as response:
            if response.status == 200:
                await _read_prompt(response, capture)
                await self._capture(path, response, capture, send, on_finished, exchange)
                if capture.usage_chunk is not None and capture.has_one_choice:
                    self.forms.learn_usage_chunk(path, capture.usage_chunk)
                return
            if response.status != BAD_REQUEST:
                return await self._relay(response, send, raises_refused)
        # vLLM's error messages quote the request. The client must not see the capture's fields.
        plain_body = plain() if plain is not None else orjson.dumps(capture.body)
        async with self._send_raw("POST", path, plain_body, headers) as response:
            await self._relay(response, send, raises_refused, exchange)
            if response.status == 200:
                capture.mark_refused()
                await on_finished()

    async def capture_siblings(
        self,
        path: str,
        shared: SharedCapture,
        headers: dict[str, str],
        first_index: int,
        send: Send,
        on_complete: Callable[[Sequence[CompleteChoice]], Awaitable[None]],
        raises_refused: ErrorPredicate | None = None,
        version_of: Callable[[CallCapture], int | None] = lambda _: None,
    ) -> None:
        """Forward a call that samples several siblings (answers to the same request), and record
        its tokens. Send each answer as soon as it is complete, as one part of the response.

        `first_index` is the index of the first sibling. `on_complete` is called with choices that
        have become complete, before their answers are sent. `version_of` returns the weight version
        to send in a header of the answer, or None to send no such header. If the engine fails after
        a part was sent, the response ends without the answers that were not complete. Raises
        CannotShare if no part was sent and each sibling needs a call of its own. Raises WireError
        for an error event of the engine. In all other cases, the errors are the same as for
        `capture`.
        """
        if self.endpoint.is_bundled:
            body = shared.complete_body
            asking = headers | {PROMPTS_HEADER: ASKED, CHOICES_HEADER: ASKED}
        else:
            body, asking = shared.upstream_body, headers
        async with self._send(path, body, asking) as response:
            if response.status != 200:
                return await self._relay(response, send, raises_refused)
            chunks = await self._choice_chunks(response, shared)
            relayed = _part_headers(response, is_streamed=shared.is_streamed)
            parts = PartEncoder()
            is_started = False
            try:
                async for chunk in chunks:
                    choices = await _complete(shared, shared.split(chunk))
                    if not choices:
                        continue
                    await on_complete(choices)
                    if not is_started:
                        is_started = True
                        await start_stream(send, 200, parts.headers)
                    answers = [
                        AnswerPart(
                            first_index + choice.index,
                            [*relayed, *version_headers(version_of(choice.capture))],
                            choice.answer,
                        )
                        for choice in choices
                    ]
                    await send_chunk(send, b"".join(map(parts.part, answers)))
                if not shared.is_complete:
                    raise aiohttp.ClientPayloadError("the stream ended before all choices")
            except (aiohttp.ClientError, TimeoutError, CannotShare):
                if not is_started:
                    raise
            except EngineStreamError as error:
                if not is_started and not await self.is_healthy():
                    raise EngineFailed("the engine's stream ended with an error") from error
                if not is_started:
                    raise stream_error(error.body) from error
            await send_chunk(send, parts.end(), last=True)

    async def _choice_chunks(
        self, response: aiohttp.ClientResponse, shared: SharedCapture
    ) -> AsyncIterator[bytes]:
        """Return an iterator over the bytes of `response`, the response to a call that samples
        several choices. If the response begins with the prompt's token ids, the ids are first read
        into `shared`, and are not in the iterator. Raises CannotShare if the response is neither an
        event stream nor a response with one part for each choice."""
        await _read_prompt(response, shared)
        if response.content_type == _EVENT_STREAM:
            return await self._first_chunk_checked(response)
        if response.content_type != MEDIA_TYPE:
            raise CannotShare("the engine does not stream")
        shared.read_parts(response.headers["Content-Type"])
        return _chunks(response)

    async def _relay(
        self,
        response: aiohttp.ClientResponse,
        send: Send,
        raises_refused: ErrorPredicate | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        headers = relayed_headers(response.raw_headers)
        if response.status >= BAD_REQUEST:
            headers += reason_headers(_outage_reason(response))
            refused = Refused(response.status, await _read(response), headers)
            if raises_refused is not None and raises_refused(refused.status, refused.body):
                raise refused
            return await send_bytes(send, refused.status, refused.raw, refused.headers)
        if response.content_type == _EVENT_STREAM:
            chunks = await self._first_chunk_checked(response)
            return await _send_stream(send, response.status, headers, chunks, exchange)
        raw = _translated(await _read(response), exchange)
        await send_bytes(send, response.status, raw, headers)

    async def _capture(
        self,
        path: str,
        response: aiohttp.ClientResponse,
        capture: CallCapture,
        send: Send,
        on_finished: Callable[[], Awaitable[None]],
        exchange: Exchange | None,
    ) -> None:
        headers = relayed_headers(response.raw_headers)
        if response.content_type == _EVENT_STREAM:
            chunks = await self._first_chunk_checked(response)
            events = _captured_stream(chunks, capture, on_finished)
            return await _send_stream(send, response.status, headers, events, exchange)

        def learn(answer: Json) -> None:
            if capture.has_one_choice:
                self.forms.learn_whole(path, answer)

        raw = _translated(capture.answer(await _read(response), learn), exchange)
        await on_finished()
        await send_bytes(send, response.status, raw, headers)

    def _send(
        self, path: str, body: Json, headers: dict[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send `body` to the engine in a POST request, and yield the response. If the engine knows
        the served weights by the name of a LoRA adapter, this name is put into the field `model` of
        a request for these weights. Raises NotWritable if the body cannot be written as JSON. All
        other errors are those of `_request`."""
        name = self._adapter_name
        addressed = None if name is None else name.request(body)
        if addressed is None:
            return self._request("POST", path, write_body(body), headers)
        return self._request("POST", path, write_body(addressed), headers, name)

    def _send_raw(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request with the client's own bytes as its body, and yield the response. If the
        engine knows the served weights by the name of a LoRA adapter, this name first replaces the
        model's name in the body. The errors are those of `_request`."""
        name = self._adapter_name
        addressed = None if name is None or not body else name.raw_request(body)
        if addressed is None:
            return self._request(method, path, body, headers)
        return self._request(method, path, addressed, headers, name)

    @property
    def _adapter_name(self) -> AdapterName | None:
        adapter = self.endpoint.gate.adapter
        return None if adapter is None else AdapterName(self.endpoint.model_name, adapter)

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        name: AdapterName | None = None,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request to the engine, and yield the response. `name` is set if the body names a
        LoRA adapter in place of the model. The response keeps `name`, so that the model's name can
        be restored in the answer.

        Raises EngineFailed in three cases. The connection fails, the status is not a final HTTP
        status, or the engine answers with an error and its health check fails.
        """
        if self._http.closed:
            raise EngineFailed("the connection to the engine is closed")
        try:
            async with await self._connect(method, path, body, headers) as response:
                if not is_final_status(response.status):
                    raise EngineFailed(f"the engine answered with status {response.status}")
                if response.status in _FAILURE_STATUSES and not await self.is_healthy():
                    raise EngineFailed(
                        f"the engine answered with status {response.status} and is not healthy"
                    )
                assert isinstance(response, _Response)
                response.adapter_name = name
                self._responses.add(response)
                try:
                    yield response
                finally:
                    self._responses.discard(response)
        except aiohttp.ClientError as error:
            raise EngineFailed(str(error)) from error

    async def _connect(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        """Send a request, and return the response as soon as its headers have arrived. If a reused
        connection breaks before that, the engine may have been closing this connection. The request
        is then sent once more on a new connection. Raises aiohttp.ClientError if a new connection
        breaks."""

        async def send_in(
            session: aiohttp.ClientSession, connection: _ConnectionUse
        ) -> aiohttp.ClientResponse:
            return await session.request(
                method,
                path,
                data=body or None,
                headers=headers,
                allow_redirects=False,
                trace_request_ctx=connection,
            )

        connection = _ConnectionUse()
        try:
            return await send_in(self._http, connection)
        except aiohttp.ClientError:
            if not connection.is_reused or self._unpooled.closed:
                raise
            return await send_in(self._unpooled, connection)

    async def _first_chunk_checked(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Wait for the first bytes of a stream. Return an iterator over the whole stream.

        Until the first bytes arrive, nothing is sent to the client, so the call can be retried. If
        the stream is empty or begins with an error, the engine's health is checked. Raises
        EngineFailed if this check fails. Raises aiohttp.ClientError if the connection breaks.
        """
        chunks = _chunks(response)
        first = await anext(chunks, b"")
        if _is_failure(first) and not await self.is_healthy():
            raise EngineFailed("the engine's stream began with an error")
        return _joined(first, chunks)


def _session(endpoint: Endpoint, *, is_pooled: bool) -> aiohttp.ClientSession:
    """Return an HTTP session for requests to the engine at `endpoint`. If `is_pooled` is set, the
    session reuses connections. If not, it opens a new connection for each request."""
    pooling: dict[str, Any] = {"keepalive_timeout": IDLE_CONNECTION_S}
    if not is_pooled:
        pooling = {"force_close": True}
    connector: aiohttp.BaseConnector
    if endpoint.socket is not None:
        connector = aiohttp.UnixConnector(str(endpoint.socket), limit=0, **pooling)
    else:
        connector = aiohttp.TCPConnector(limit=0, **pooling)
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        endpoint.url,
        connector=connector,
        trace_configs=[trace],
        headers=endpoint.headers,
        response_class=_Response,
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S),
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
    )


def write_body(body: Json) -> bytes:
    """Return a request body as JSON. Raises NotWritable if the body has integers beyond 64 bits."""
    try:
        return orjson.dumps(body)
    except TypeError as error:
        raise NotWritable(str(error)) from error


async def _read_prompt(
    response: aiohttp.ClientResponse, capture: CallCapture | SharedCapture
) -> None:
    """Read the token ids of the prompt if the engine sends the ids in front of the answer. Raises
    EngineFailed if the ids are incomplete."""
    sizes = parse_sizes(response.headers.get(PROMPTS_HEADER))
    if sizes:
        try:
            capture.use_prompt_ids(ids_from_bytes(await response.content.readexactly(sizes[0])))
        except asyncio.IncompleteReadError as error:
            raise EngineFailed("the engine broke off within the prompt") from error


def stream_error(body: Json) -> WireError:
    """Return the WireError for an error event with which the engine ended a stream."""
    match body:
        case {"error": {"code": int(code)}} if 400 <= code < 600:
            return WireError(code, body)
        case _:
            return internal_error()


def _part_headers(response: aiohttp.ClientResponse, *, is_streamed: bool) -> Headers:
    """Return the HTTP headers with which one sibling's answer is sent. They depend on whether the
    engine's response is an event stream or has one part for each sibling."""
    headers = relayed_headers(response.raw_headers)
    if is_streamed and response.content_type == _EVENT_STREAM:
        return headers
    own = _STREAM if is_streamed else _JSON
    return [*own, *(field for field in headers if field[0] != b"content-type")]


async def _complete(
    shared: SharedCapture, ended: Sequence[EndedChoice]
) -> Sequence[CompleteChoice]:
    """Put together the answers of choices that have ended, and return them. Long answers are put
    together in a worker thread, because the event loop must continue to serve other apps."""
    if sum(choice.num_bytes for choice in ended) < MIN_THREAD_BYTES:
        return shared.complete(ended)
    return await asyncio.to_thread(shared.complete, ended)


def _outage_reason(response: aiohttp.ClientResponse) -> OutageReason | None:
    """Return the reason why the engine did not answer a call. The reason is in a header of the
    engine's response. Without this header, the reason is derived from the HTTP status.

    Status 503 means here that the engine is overloaded. If the engine's health check also fails,
    EngineFailed is raised before this function is called.
    """
    reason = reason_from_header(response.headers.get(REASON_HEADER))
    return reason or _REASON_OF_STATUS.get(response.status)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Return the whole body of a response."""
    return b"".join([chunk async for chunk in _chunks(response)])


def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Return an iterator over a response's body. If the request named a LoRA adapter in place of
    the model, the adapter's name in the body is replaced by the model name that apps know."""
    name = response.adapter_name if isinstance(response, _Response) else None
    return _raw_chunks(response) if name is None else name.answer(_raw_chunks(response))


async def _raw_chunks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the chunks of a response's body.

    Raises aiohttp.ClientError if the engine or this process closes the connection before the end of
    the body.
    """
    try:
        async for chunk in response.content.iter_any():
            yield chunk
    except RuntimeError as error:  # aiohttp raises it if this process closed the connection
        raise aiohttp.ClientPayloadError(str(error)) from error


def _is_failure(first: bytes) -> bool:
    """Return True if a stream begins with an error event. `first` has the first bytes of the
    stream. Also return True if the stream has no bytes."""
    events = SseDecoder().feed(first)
    try:
        return not first or "error" in ((parse_event(events[0]) if events else None) or {})
    except ValueError:
        return False


async def _joined(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for chunk in chunks:
        yield chunk


async def _captured_stream(
    chunks: AsyncIterator[bytes], capture: CallCapture, on_finished: Callable[[], Awaitable[None]]
) -> AsyncIterator[bytes]:
    """Record each event of a stream and yield the events that the app may see.

    Raises aiohttp.ClientError if the stream ends without `[DONE]`.
    """
    decoder = SseDecoder()
    is_done = False
    async for chunk in chunks:
        events = decoder.feed(chunk)
        out = b"".join(map(capture.event, events))
        if DONE in events and not is_done:
            is_done = True
            await on_finished()
        if out:
            yield out
    if not is_done:
        raise aiohttp.ClientPayloadError("the stream ended without [DONE]")


async def _send_stream(
    send: Send,
    status: int,
    headers: Headers,
    chunks: AsyncIterator[bytes],
    exchange: Exchange | None = None,
) -> None:
    """Send a stream to the client.

    If the engine fails during the stream, the stream ends with an error event. The client then does
    not mistake the incomplete answer for a complete one.
    """
    await start_stream(send, status, headers)
    error = internal_error().body
    try:
        async for chunk in chunks if exchange is None else _translated_stream(chunks, exchange):
            if chunk:
                await send_chunk(send, chunk)
    except (aiohttp.ClientError, TimeoutError):
        await send_chunk(send, exchange.end_with_error(error) if exchange else encode(error) + DONE)
    await send_chunk(send, b"", last=True)


def _translated(raw: bytes, exchange: Exchange | None) -> bytes:
    """Return an answer in the client's format. The answer is translated by `exchange`. If
    `exchange` is None, the answer is returned unchanged.

    Raises Refused if the answer cannot be translated. The error is not EngineFailed, because
    EngineFailed would cause a retry, and the retry would sample a second answer.
    """
    try:
        return raw if exchange is None else exchange.answer(raw)
    except ValueError as error:
        log.warning("an engine's answer cannot be translated to the client's format: %s", error)
        raise Refused(500, orjson.dumps(internal_error().body), _JSON) from error


async def _translated_stream(
    chunks: AsyncIterator[bytes], exchange: Exchange
) -> AsyncIterator[bytes]:
    """Translate the engine's event stream into the client's format.

    If the engine's stream ends without `[DONE]`, the events that end a stream in the client's
    format are added.
    """
    decoder = SseDecoder()
    received: list[bytes] = []
    async for chunk in chunks:
        events = decoder.feed(chunk)
        received += events
        yield b"".join(map(exchange.event, events))
    if DONE not in received:
        yield stream_end(exchange, received)
