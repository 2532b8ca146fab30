"""One answer of the upstream, passed on to the app while it comes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.engine_client import EngineClient, EngineResponse, LiveResponse
from fakevllm.transport.request import Request
from fakevllm.transport.retry_policy import OUTAGES, TOO_MANY, outage_error
from fakevllm_adapters.formats.chat import stream_end
from fakevllm_adapters.formats.sse import DONE, SseDecoder, encode, parse_event
from fakevllm_adapters.http.asgi import Headers, error_object
from fakevllm_adapters.protocol.errors import WireError, internal_error


@dataclass(frozen=True, slots=True)
class LeadCall:
    """How the lead of several siblings is asked."""

    body: bytes
    headers: Mapping[str, str]
    on_first_token: Callable[[], None]


def _never() -> bool:
    return False


async def relay(
    upstream: EngineClient,
    request: Request,
    app: AppResponse,
    lead: LeadCall | None = None,
    *,
    is_caused_by_siblings: Callable[[], bool] = _never,
) -> EngineResponse:
    """Relay the upstream's answer to the app while it arrives, and return it.

    `is_caused_by_siblings`: whether siblings of the proxy overload the engine. In that case a 429
    is raised as an outage and not relayed. Raises WireError if no answer data has been sent to the
    app."""
    if request.exchange is None:
        return await relay_native(
            upstream, request, app, is_caused_by_siblings=is_caused_by_siblings
        )
    started = time.monotonic()
    path = request.adapter.upstream_path
    body, headers = (
        (request.upstream_body, request.headers) if lead is None else (lead.body, lead.headers)
    )
    async with upstream.live("POST", path, body, headers) as live:
        await raise_outage(live, is_caused_by_siblings)
        if live.streamed and request.streamed:
            return await _stream(live, request, app, started, lead)
        raw = b"".join([chunk async for chunk in live.chunks])
        latency_s = time.monotonic() - started
        reply = EngineResponse(live.status, live.headers, raw, live.streamed, latency_s)
    return await pass_on(upstream, request, app, reply)


async def pass_on(
    upstream: EngineClient, request: Request, app: AppResponse, reply: EngineResponse
) -> EngineResponse:
    """A whole reply of the upstream, as the app reads it. Returns the reply the app got."""
    if reply.status == 200:
        await app.answer(reply)
        return reply
    is_refused = 400 <= reply.status < 500 and not reply.is_from_stream
    if request.is_translated and is_refused and not app.is_started:
        # A refusal repeats what was asked, so the app's own words must be what is refused.
        app.stop_keep_alives()
        return await relay_native(upstream, request, app)
    return await _refuse(request, app, reply)


async def relay_native(
    upstream: EngineClient,
    request: Request,
    app: AppResponse,
    *,
    is_caused_by_siblings: Callable[[], bool] = _never,
) -> EngineResponse:
    """The answer of the engine's own route for the app's format, byte for byte."""
    started = time.monotonic()
    taken: list[bytes] = []
    headers: Headers = []
    status, is_streamed = 200, False
    try:
        async with upstream.live(
            "POST", request.adapter.path, request.raw, request.headers
        ) as live:
            await raise_outage(live, is_caused_by_siblings)
            status, headers, is_streamed = live.status, live.headers, live.streamed
            if is_streamed:
                await app.open(headers)
            async for chunk in live.chunks:
                taken.append(chunk)
                if is_streamed:
                    await app.write(chunk)
            if is_streamed:
                await app.write(b"", last=True)
            else:
                await app.send_body(status, b"".join(taken), headers)
    except WireError as error:
        if not app.is_started:
            raise
        await app.write(encode(error.body) + DONE, last=True)
    latency_s = time.monotonic() - started
    return EngineResponse(status, headers, b"".join(taken), is_streamed, latency_s)


async def _stream(
    live: LiveResponse, request: Request, app: AppResponse, started: float, lead: LeadCall | None
) -> EngineResponse:
    assert request.exchange is not None
    is_waited_for = lead is not None
    taken: list[bytes] = []
    decoder = SseDecoder()
    try:
        async for chunk in live.chunks:
            events = decoder.feed(chunk)
            if events and not taken and not app.is_started:
                early = EngineResponse(
                    200, [], events[0], True, time.monotonic() - started
                ).unwrap_early_error()
                if not early.streamed:
                    return await _refuse(request, app, early)
            taken += events
            shown = b"".join(map(request.exchange.event, events))
            is_done = DONE in events  # whatever comes behind it is nobody's
            if shown or is_done:
                await app.open(live.headers)
                was_told = app.has_answer_data
                is_answer = was_told or any(not one.startswith(b":") for one in events)
                await app.write(shown, last=is_done, is_answer=is_answer)
                if is_answer and not was_told:
                    app.on_stream_started(_id_in(events))
            # Behind the write: the app's first token waits for nothing.
            if is_waited_for and lead is not None and _has_token(taken):
                is_waited_for = False
                lead.on_first_token()
            if is_done:
                return EngineResponse.from_events(taken, time.monotonic() - started)
        await app.open(live.headers)
        await app.write(stream_end(request.exchange, taken), last=True)
    except WireError as error:
        if not app.has_answer_data:
            raise
        taken += [encode(error.body), DONE]
        await app.write(request.exchange.end_with_error(error.body), last=True)
    return EngineResponse.from_events(taken, time.monotonic() - started)


def _id_in(events: Sequence[bytes]) -> str | None:
    for event in events:
        with contextlib.suppress(ValueError):  # what is no JSON is the reader's to refuse
            told = parse_event(event)
            if told is not None and isinstance(told.get("id"), str):
                return told["id"]
    return None


def _has_token(events: Sequence[bytes]) -> bool:
    """The first event may but tell the role, before the engine has looked at the prompt."""
    return sum(not event.startswith(b":") for event in events) >= 2


async def raise_outage(
    live: LiveResponse, is_caused_by_siblings: Callable[[], bool] = _never
) -> None:
    """Raises WireError for a status by which a server says that it has no answer now."""
    if live.status in OUTAGES or (live.status == TOO_MANY and is_caused_by_siblings()):
        raw = b"".join([chunk async for chunk in live.chunks])
        raise outage_error(live.status, raw, live.headers, live.reason)


async def _refuse(request: Request, app: AppResponse, reply: EngineResponse) -> EngineResponse:
    if request.is_translated:
        told = error_object(reply.body) or internal_error().body
        await app.refuse(WireError(reply.status, told))
    else:
        await app.send_body(reply.status, reply.body, reply.headers)
    return reply
