"""What a TokenEngine samples for one choice, as pieces of text with their tokens; and several
choices at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fakevllm_adapters.vllm_compat.chat_request import ChatRequest
from fakevllm_server.backends.http.text_stream import Detokenizer, StopScanner
from fakevllm_server.types.backend import TokenEngine
from fakevllm_server.types.sampling import Sampling, Token
from fakevllm_server.types.token_masks import TokenMasks

Json = dict[str, Any]
T = TypeVar("T")


@dataclass(slots=True)
class Piece:
    """What one engine iteration added to a choice."""

    text: str
    tokens: Sequence[Token]


@dataclass(slots=True)
class Progress:
    """One choice while it is being sampled."""

    index: int
    tokens: list[Token] = field(default_factory=list[Token])
    text: str = ""
    finish_reason: str = "length"
    stop_reason: str | int | None = None
    """The stop string or stop id that ended it."""


async def sampled(
    engine: TokenEngine,
    request: ChatRequest,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    choice: Progress,
) -> AsyncGenerator[Piece]:
    """Sampled pieces with their text, which `choice` adds up; ends at the end of sequence, a stop
    or the limit."""
    skips = request.skip_special_tokens
    text = Detokenizer(partial(engine.decode, skip_special_tokens=skips))
    shows_stop = request.include_stop_str_in_output
    stops = StopScanner(request.stops, shows_stop=shows_stop)
    async with aclosing(engine.generate(prompt_ids, sampling)) as tokens:
        async for batch in tokens:
            choice.tokens.extend(batch)
            last = batch[-1].id
            stopped = last in sampling.stop_ids
            ended = last in engine.eos_ids and not sampling.ignore_eos
            spoken = batch[:-1] if ended or (stopped and not shows_stop) else batch
            if ended or stopped:
                choice.finish_reason = "stop"
                choice.stop_reason = None if ended else last
            said = text.push([token.id for token in spoken], last=ended or stopped)
            is_armed = len(choice.tokens) > sampling.min_tokens
            piece = Piece(stops.push(said, is_armed=is_armed), batch)
            if stops.hit is not None:
                choice.finish_reason, choice.stop_reason = "stop", stops.hit
            choice.text += piece.text
            yield piece
            if stops.hit is not None:
                return
    rest = stops.push(text.push([], last=True)) + stops.flush()
    if rest:
        choice.text += rest
        yield Piece(rest, ())


def shown_ids(request: ChatRequest, tokens: Sequence[Token]) -> list[int] | None:
    return [token.id for token in tokens] if request.return_token_ids else None


def shown_spans(request: ChatRequest, tokens: Sequence[Token]) -> list[Json] | None:
    return _version_spans(tokens) if request.return_weight_versions else None


def shown_allowed(
    engine: TokenEngine, request: ChatRequest, tokens: Sequence[Token]
) -> Json | None:
    """What each token was chosen from, where the engine knows it."""
    if not (engine.reports_allowed and request.requests_allowed_tokens):
        return None
    return TokenMasks.from_packed_sets([token.allowed for token in tokens]).to_wire()


def _version_spans(tokens: Sequence[Token]) -> list[Json]:
    """Which weights sampled which tokens: `{version, start, end}` over the response."""
    spans: list[Json] = []
    for at, token in enumerate(tokens):
        if not spans or spans[-1]["version"] != token.version:
            spans.append({"version": token.version, "start": at, "end": at})
        spans[-1]["end"] = at + 1
    return spans


async def together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs all. Where one fails the others are cancelled and its error is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for work in works:
                tasks.create_task(work)
    # Translated: callers know an engine's own errors, not groups of them.
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def merged(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """What each yields, as it comes. Closing it closes them all; an error of one surfaces once
    the others have ended."""
    queue: asyncio.Queue[tuple[T] | None] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            else:
                yield item[0]
        for pump in pumps:
            pump.result()
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def streamed(
    choices: Sequence[AsyncGenerator[Json]], usage_chunk: Callable[[], Json] | None
) -> AsyncGenerator[Json]:
    """Chunks of all choices as they come, the usage chunk last where there is to be one."""
    async with aclosing(merged(choices)) as chunks:
        async for chunk in chunks:
            yield chunk
    if usage_chunk is not None:
        yield usage_chunk()


async def _pump(stream: AsyncGenerator[T], queue: asyncio.Queue[tuple[T] | None]) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait((item,))
    finally:
        queue.put_nowait(None)


async def drained(stream: AsyncGenerator[object]) -> None:
    async with aclosing(stream):
        async for _ in stream:
            pass
