"""One answer of the upstream, passed on to the app while it comes."""

from __future__ import annotations

import time

import orjson

from fakevllm.reply import AppReply
from fakevllm.siblings import Request
from fakevllm.upstream import LiveReply, Reply, Upstream, unreachable
from fakevllm_adapters.asgi import Headers, json_object
from fakevllm_adapters.base import Exchange
from fakevllm_adapters.errors import WireError
from fakevllm_adapters.sse import DONE, SseDecoder, encode, json_of


async def relay(upstream: Upstream, request: Request, app: AppReply) -> Reply:
    """Returns what the upstream answered. Raises WireError while the app has got nothing."""
    if request.exchange is None:
        return await relay_native(upstream, request, app)
    started = time.monotonic()
    path, body = request.adapter.upstream_path, request.asked
    async with upstream.live("POST", path, body, request.headers) as live:
        if live.streamed:
            return await _stream(live, request.exchange, app, started)
        raw = b"".join([chunk async for chunk in live.chunks])
        reply = Reply(live.status, live.headers, raw, False, time.monotonic() - started)
    return await pass_on(upstream, request, app, reply)


async def pass_on(upstream: Upstream, request: Request, app: AppReply, reply: Reply) -> Reply:
    """A whole reply of the upstream, as the app reads it. Returns the reply the app got."""
    if reply.status == 200:
        await app.answer(reply)
    elif request.is_translated and 400 <= reply.status < 500:
        # A refusal repeats what was asked, so the app's own words must be what is refused.
        return await relay_native(upstream, request, app)
    elif request.is_translated:
        worded = request.adapter.refusal(reply.status, json_object(reply.body) or {})
        await app.whole(reply.status, orjson.dumps(worded), reply.headers)
    else:
        await app.whole(reply.status, reply.body, reply.headers)
    return reply


async def relay_native(upstream: Upstream, request: Request, app: AppReply) -> Reply:
    """The answer of the engine's own route for the app's format, byte for byte."""
    started = time.monotonic()
    taken: list[bytes] = []
    headers: Headers = []
    status, is_streamed = 200, False
    try:
        async with upstream.live(
            "POST", request.adapter.path, request.raw, request.headers
        ) as live:
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
                await app.whole(status, b"".join(taken), headers)
    except WireError as error:
        if not app.is_begun:
            raise
        await app.write(encode(error.body) + DONE, last=True)
    latency_s = time.monotonic() - started
    return Reply(status, headers, b"".join(taken), is_streamed, latency_s)


async def _stream(live: LiveReply, exchange: Exchange, app: AppReply, started: float) -> Reply:
    taken: list[bytes] = []
    decoder = SseDecoder()
    is_done = False
    try:
        async for chunk in live.chunks:
            events = decoder.feed(chunk)
            refused = _refusal(events[0]) if events and not taken else None
            taken.append(chunk)
            if refused is not None and not app.is_begun:
                await app.refuse(refused)
                body = orjson.dumps(refused.body)
                return Reply(refused.status, [], body, False, time.monotonic() - started)
            is_done = is_done or DONE in events
            shown = b"".join(map(exchange.event, events))
            if shown:
                await app.open(live.headers)
                await app.write(shown)
        if not is_done:
            raise unreachable(EOFError("the stream broke off"))
        await app.write(b"", last=True)
    except WireError as error:
        if not app.is_begun:
            raise
        taken.append(encode(error.body) + DONE)
        await app.write(exchange.broken(error.body), last=True)
    return Reply(200, [], b"".join(taken), True, time.monotonic() - started)


def _refusal(event: bytes) -> WireError | None:
    """The error a stream begins with, where it is one that will not heal: clients ask again
    without end for what fails inside a stream, and take a status for final."""
    if b'"error"' not in event:
        return None
    body = json_of(event) or {}
    error = body.get("error")
    code = error.get("code") if isinstance(error, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return WireError(code, body) if isinstance(code, int) and 400 <= code < 500 else None
