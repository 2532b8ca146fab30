"""Sample several siblings (answers to one request) with one call to the server. Each choice of the
call is a sibling.

The server sends a sibling's answer as soon as the answer is complete.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence

from fakevllm.transport.engine_client import EVENT_STREAM, EngineClient, EngineResponse
from fakevllm.transport.request import (
    Request,
    SiblingPlan,
    SiblingResult,
    read_answer,
    sibling_headers,
)
from fakevllm.transport.retry_policy import TOO_MANY_REQUESTS
from fakevllm_adapters.http.answer_parts import AnswerPart, PartDecoder
from fakevllm_adapters.http.asgi import Headers
from fakevllm_adapters.protocol.errors import WireError, unavailable
from fakevllm_adapters.protocol.outage_reasons import OutageReason


def broken_off() -> WireError:
    """Return the error for a sibling whose answer was incomplete when a shared call broke off. A
    shared call samples several siblings (answers to one request)."""
    return unavailable(
        "The model server broke off before the answer was complete.", OutageReason.SERVER_BROKE_OFF
    )


class NotShared(Exception):
    """Error if the server refuses a shared call, which samples several siblings (answers to one
    request). Each sibling then needs a call of its own."""


async def sample_shared(
    upstream: EngineClient,
    request: Request,
    plan: SiblingPlan,
    indices: Sequence[int],
    temperature: float,
) -> AsyncGenerator[SiblingResult]:
    """Sample several siblings (answers to one request) with one call to the engine. `indices` are
    the siblings' indices, which must be consecutive. Yield the result of each sibling as soon as it
    is known.

    If the engine fails during the call, no result is yielded for the siblings without a complete
    answer. If the engine answers with an error, the result of each sibling contains this error.
    Raises NotShared if the server refuses the call. Raises WireError if the server cannot be
    reached, or if the connection breaks.
    """
    body = plan.shared_body(request, indices, temperature)
    headers = sibling_headers(request, indices[0], len(indices))
    path = request.adapter.upstream_path
    started = time.monotonic()
    async with upstream.live("POST", path, body, headers) as live:
        if live.status != 200:
            raw = await live.read()
            if 400 <= live.status < 500 and live.status != TOO_MANY_REQUESTS:
                raise NotShared
            latency_s = time.monotonic() - started
            reply = EngineResponse(
                live.status, live.headers, raw, False, latency_s, reason=live.reason
            )
            for index in indices:
                yield SiblingResult(index, reply)
            return
        missing = set(indices)
        decoder = _decoder(live.headers)
        async for chunk in live.chunks:
            for part in _parts(decoder, chunk):
                if part.index in missing:
                    missing.remove(part.index)
                    reply = _reply(part, time.monotonic() - started)
                    yield SiblingResult(part.index, reply, read_answer(request, reply))
            if not missing:
                return


def _decoder(headers: Headers) -> PartDecoder:
    """Return the decoder for a response with one part per sibling. Raises NotShared if the headers
    show that the response has no parts. Responses of older servers have no parts: these servers
    know the request field `n`, but not the request header that names the siblings."""
    content_type = dict(headers).get(b"content-type", b"").decode("latin-1")
    try:
        return PartDecoder(content_type)
    except ValueError as error:
        raise NotShared from error


def _parts(decoder: PartDecoder, chunk: bytes) -> list[AnswerPart]:
    try:
        return decoder.feed(chunk)
    except ValueError as error:
        raise broken_off() from error


def _reply(part: AnswerPart, latency_s: float) -> EngineResponse:
    content_type = dict(part.headers).get(b"content-type", b"").decode("latin-1")
    is_stream = content_type.startswith(EVENT_STREAM)
    return EngineResponse(200, part.headers, part.body, is_stream, latency_s)
