"""Relay one answer of the upstream server to the app while the answer arrives."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.engine_client import EngineClient, EngineResponse, LiveResponse
from fakevllm.transport.request import Request
from fakevllm.transport.request_arm import check_policy
from fakevllm.transport.retry_policy import OUTAGES, TOO_MANY_REQUESTS, outage_error
from fakevllm_adapters.formats.chat import stream_end
from fakevllm_adapters.formats.model_name import with_model_name
from fakevllm_adapters.formats.sse import DONE, SseDecoder, encode, parse_event
from fakevllm_adapters.http.asgi import Headers, error_object
from fakevllm_adapters.protocol.errors import WireError, internal_error


@dataclass(frozen=True, slots=True)
class LeadCall:
    """The engine call that samples the lead of a request that has further siblings. The siblings
    are the answers that are sampled for one request. The lead (sibling 0) is the answer that the
    app has requested, and the proxy adds the other siblings."""

    body: bytes
    headers: Mapping[str, str]
    on_first_token: Callable[[], None]
    """Function that is called once, after the first token has been sent to the app."""


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
    """Relay the upstream server's answer to the app while it arrives, and return the answer.

    The siblings that this proxy adds to requests may have caused a 429 (too many requests). If
    `is_caused_by_siblings` returns True, a 429 is treated as an outage and not relayed.

    If an outage occurs before answer data has been sent to the app, WireError is raised. A later
    outage ends the stream to the app with an error event. The call may name a policy (weights that
    the engine holds beside the served weights). If the engine does not hold this policy, nothing is
    sent to the app, and PolicyGone is raised.
    """
    if request.exchange is None:
        return await relay_native(
            upstream, request, app, is_caused_by_siblings=is_caused_by_siblings
        )
    started = time.monotonic()
    path = request.adapter.upstream_path
    body, headers = (
        (request.upstream_body, request.call_headers) if lead is None else (lead.body, lead.headers)
    )
    async with upstream.live("POST", path, body, headers) as live:
        check_policy(request.arm, live.status)
        await raise_outage(live, is_caused_by_siblings)
        if live.streamed and request.streamed:
            return await _relay_stream(live, request, app, started, lead)
        raw = await live.read()
        latency_s = time.monotonic() - started
        reply = EngineResponse(live.status, live.headers, raw, live.streamed, latency_s)
    return await pass_on(upstream, request, app, reply)


async def pass_on(
    upstream: EngineClient, request: Request, app: AppResponse, reply: EngineResponse
) -> EngineResponse:
    """Send a complete reply of the upstream server to the app, in the app's format. Return the
    reply that the app got.

    If the engine has refused a translated request, the app's original request is sent to the
    engine's own route for the app's format. The reply of that route is relayed instead. If the
    engine has no such route, the app gets the refusal in the app's format.
    """
    if reply.status == 200:
        await app.answer(reply)
        return reply
    is_refused = 400 <= reply.status < 500 and not reply.is_from_stream
    # The engine's own routes do not know the policy.
    is_served = request.arm is None or request.arm.policy is None
    has_native_route = request.is_translated and request.has_native_route and is_served
    if has_native_route and is_refused and not app.is_started:
        # A refusal quotes parts of the request. The app must see its own request quoted.
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
    """Send the app's request to the engine's own route for the app's format. Relay the answer, and
    return it. The answer stays unchanged, except that the model's name becomes the alias that the
    app has used.

    In an outage, WireError is raised if the response to the app has not started yet. A later outage
    ends the response with an error event.
    """
    started = time.monotonic()
    chunks: list[bytes] = []
    headers: Headers = []
    status, is_streamed = 200, False
    decoder = SseDecoder()
    try:
        async with upstream.live(
            "POST", request.adapter.path, request.raw, request.call_headers
        ) as live:
            await raise_outage(live, is_caused_by_siblings)
            status, headers, is_streamed = live.status, live.headers, live.streamed
            if is_streamed:
                await app.open(headers)
            async for chunk in live.chunks:
                if is_streamed and request.alias is not None:
                    chunk = b"".join(
                        with_model_name(event, request.alias) for event in decoder.feed(chunk)
                    )
                chunks.append(chunk)
                if is_streamed:
                    await app.write(chunk)
            if is_streamed:
                chunks.append(decoder.rest())
                await app.write(chunks[-1], last=True)
            else:
                body = b"".join(chunks)
                if request.alias is not None and status == 200:
                    body = with_model_name(body, request.alias)
                await app.send_body(status, body, headers)
    except WireError as error:
        if not app.is_started:
            raise
        await app.write(encode(error.body) + DONE, last=True)
    latency_s = time.monotonic() - started
    return EngineResponse(status, headers, b"".join(chunks), is_streamed, latency_s)


async def _relay_stream(
    live: LiveResponse, request: Request, app: AppResponse, started: float, lead: LeadCall | None
) -> EngineResponse:
    """Relay the engine's stream to the app event by event, in the app's format. Return the engine's
    complete stream.

    If the first event is a permanent error, the app gets a plain error response. If the stream
    breaks off after answer data has been sent, the app gets an error event. If the stream breaks
    off earlier, WireError is raised.
    """
    assert request.exchange is not None
    awaits_token = lead is not None
    events: list[bytes] = []
    decoder = SseDecoder()
    try:
        async for chunk in live.chunks:
            new_events = decoder.feed(chunk)
            if new_events and not events and not app.is_started:
                latency_s = time.monotonic() - started
                first = EngineResponse(200, [], new_events[0], True, latency_s)
                unwrapped = first.unwrap_early_error()
                if not unwrapped.streamed:
                    return await _refuse(request, app, unwrapped)
            events += new_events
            shown = b"".join(map(request.exchange.event, new_events))
            is_done = DONE in new_events  # bytes after [DONE] are dropped
            if shown or is_done:
                if not app.is_started:
                    await app.open(live.headers)
                had_answer_data = app.has_answer_data
                is_answer = had_answer_data or any(
                    not event.startswith(b":") for event in new_events
                )
                await app.write(shown, last=is_done, is_answer=is_answer)
                if is_answer and not had_answer_data:
                    app.on_stream_started(_find_id(new_events))
            # The callback comes after the write, so that it does not delay the app's first token.
            if awaits_token and lead is not None and _has_token(events):
                awaits_token = False
                lead.on_first_token()
            if is_done:
                return EngineResponse.from_events(events, time.monotonic() - started)
        await app.open(live.headers)
        await app.write(stream_end(request.exchange, events), last=True)
    except WireError as error:
        if not app.has_answer_data:
            raise
        events += [encode(error.body), DONE]
        await app.write(request.exchange.end_with_error(error.body), last=True)
    return EngineResponse.from_events(events, time.monotonic() - started)


def _find_id(events: Sequence[bytes]) -> str | None:
    """Return the first answer id that these events contain. Return None if the events contain no
    answer id."""
    for event in events:
        # An event that is not valid JSON is skipped. The format's parser refuses it.
        with contextlib.suppress(ValueError):
            payload = parse_event(event)
            if payload is not None and isinstance(payload.get("id"), str):
                return payload["id"]
    return None


def _has_token(events: Sequence[bytes]) -> bool:
    """Return True if the events surely contain a token. This is the case if there are at least two
    events. Comments do not count as events. A single event proves nothing, because the engine may
    send an event with only the role before it has processed the prompt."""
    return sum(not event.startswith(b":") for event in events) >= 2


async def raise_outage(
    live: LiveResponse, is_caused_by_siblings: Callable[[], bool] = _never
) -> None:
    """Raise WireError if the response's status reports an outage. A 429 (too many requests) is also
    an outage if `is_caused_by_siblings` returns True: the siblings that this proxy adds may have
    caused the 429."""
    if live.status in OUTAGES or (live.status == TOO_MANY_REQUESTS and is_caused_by_siblings()):
        raw = await live.read()
        raise outage_error(live.status, raw, live.headers, live.reason)


async def _refuse(request: Request, app: AppResponse, reply: EngineResponse) -> EngineResponse:
    """Send `reply`, an error of the upstream server, to the app in the app's format. Return
    `reply`."""
    if request.is_translated:
        error_body = error_object(reply.body) or internal_error().body
        await app.refuse(WireError(reply.status, error_body))
    else:
        await app.send_body(reply.status, reply.body, reply.headers)
    return reply
