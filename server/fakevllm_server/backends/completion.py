"""One chat request on a TokenEngine: from validated body to answer or chunks, as vLLM would write
them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from fakevllm_adapters.errors import unknown_model
from fakevllm_adapters.vllm_answer import (
    ChatWriter,
    Choice,
    assistant_message,
    new_response_id,
    usage_of,
)
from fakevllm_adapters.vllm_chat import ChatRequest, check_length
from fakevllm_server.backends.base import Sampling, Token, TokenEngine, used_temperature
from fakevllm_server.backends.text_stream import (
    Detokenizer,
    StopScanner,
    ToolScanner,
    split_tool_calls,
)

Json = dict[str, Any]

FINGERPRINT = "vllm-fakevllm-0"


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
    stop_reason: str | None = None


class Completion:
    """The life of one request. Construction raises WireError for what vLLM would refuse."""

    def __init__(self, engine: TokenEngine, request: ChatRequest, request_id: str | None) -> None:
        if request.model not in (None, engine.model_name):
            raise unknown_model(request.model or "", engine.model_name)
        self._engine = engine
        self._request = request
        self._prompt_ids = engine.render(request)
        limit = check_length(len(self._prompt_ids), request.limit, engine.max_model_len)
        self._sampling = _sampling(request, engine.default_sampling, limit)
        self._choices = [Progress(index) for index in range(request.n or 1)]
        self._writer = ChatWriter(
            new_response_id(request_id or request.request_id),
            int(time.time()),
            engine.model_name,
            FINGERPRINT,
        )

    async def answer(self) -> Json:
        try:
            async with asyncio.TaskGroup() as drains:
                for choice in self._choices:
                    drains.create_task(self._drain(choice))
        # Translated: callers know an engine's own errors, not groups of them.
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        choices = [self._finished(choice) for choice in self._choices]
        return self._writer.completion(choices, self._usage(), self._shown_prompt())

    async def chunks(self) -> AsyncGenerator[Json]:
        """Chunks of all choices as they come, the usage chunk last where it was asked for."""
        queue: asyncio.Queue[Json | None] = asyncio.Queue()
        pumps = [asyncio.create_task(self._pump(choice, queue)) for choice in self._choices]
        try:
            running = len(pumps)
            while running:
                chunk = await queue.get()
                if chunk is None:
                    running -= 1
                else:
                    yield chunk
            for pump in pumps:
                pump.result()  # an engine failure surfaces here
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        if self._request.include_usage:
            yield self._writer.usage_chunk(self._usage())

    async def _drain(self, choice: Progress) -> None:
        async with aclosing(self._pieces(choice)) as pieces:
            async for _ in pieces:
                pass

    async def _pump(self, choice: Progress, queue: asyncio.Queue[Json | None]) -> None:
        try:
            async with aclosing(self._chunks_of(choice)) as chunks:
                async for chunk in chunks:
                    queue.put_nowait(chunk)
        finally:
            queue.put_nowait(None)

    async def _chunks_of(self, choice: Progress) -> AsyncGenerator[Json]:
        scanner = ToolScanner() if self._request.offers_tools else None
        opened = False
        async with aclosing(self._pieces(choice)) as pieces:
            async for piece in pieces:
                if not opened:
                    opened = True
                    yield self._writer.role_chunk(choice.index, self._shown_prompt())
                text = scanner.push(piece.text) if scanner else piece.text
                if text or (piece.tokens and self._shows_tokens()):
                    yield self._delta(choice, {"content": text} if text else {}, piece.tokens)
        held = scanner.flush() if scanner else ""
        rest, calls = split_tool_calls(held)
        if rest:
            yield self._delta(choice, {"content": rest}, ())
        for at, call in enumerate(calls):
            for delta in _tool_deltas(at, call):
                yield self._delta(choice, delta, ())
        if calls and choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
        last = self._closing(choice)
        yield self._writer.finish_chunk(last, {}, closes_stream=not self._request.include_usage)

    async def _pieces(self, choice: Progress) -> AsyncGenerator[Piece]:
        """Sampled pieces with their text; ends at the end of sequence, a stop string or the
        limit."""
        text = Detokenizer(self._engine.decode)
        stops = StopScanner(self._request.stops)
        sampling = self._sampling_of(choice.index)
        async with aclosing(self._engine.generate(self._prompt_ids, sampling)) as tokens:
            async for batch in tokens:
                choice.tokens.extend(batch)
                ended = batch[-1].id in self._engine.eos_ids and not sampling.ignore_eos
                spoken = batch[:-1] if ended else batch
                if ended:
                    choice.finish_reason = "stop"
                piece = Piece(
                    stops.push(text.push([token.id for token in spoken], last=ended)), batch
                )
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

    def _finished(self, choice: Progress) -> Choice:
        content, calls = (
            split_tool_calls(choice.text) if self._request.offers_tools else (choice.text, [])
        )
        if calls and choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
        closed = self._closing(choice)
        closed.message = assistant_message(content, calls)
        closed.logprobs = self._logprobs(choice.tokens)
        closed.token_ids = self._shown_ids(choice.tokens)
        return closed

    def _closing(self, choice: Progress) -> Choice:
        spans = version_spans(choice.tokens) if self._request.return_weight_versions else None
        return Choice(
            choice.index,
            {},
            choice.finish_reason,
            stop_reason=choice.stop_reason,
            weight_versions=spans,
        )

    def _delta(self, choice: Progress, delta: Json, tokens: Sequence[Token]) -> Json:
        return self._writer.delta_chunk(
            choice.index, delta, self._logprobs(tokens), self._shown_ids(tokens)
        )

    def _shows_tokens(self) -> bool:
        return bool(self._request.logprobs or self._request.return_token_ids)

    def _shown_ids(self, tokens: Sequence[Token]) -> list[int] | None:
        return [token.id for token in tokens] if self._request.return_token_ids else None

    def _shown_prompt(self) -> list[int] | None:
        return self._prompt_ids if self._request.return_token_ids else None

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if not self._request.logprobs or not tokens:
            return None
        return {"content": [self._logprob_entry(token) for token in tokens]}

    def _logprob_entry(self, token: Token) -> Json:
        top = [self._token_entry(id, logprob) for id, logprob in token.top]
        return self._token_entry(token.id, token.logprob) | {"top_logprobs": top}

    def _token_entry(self, id: int, logprob: float) -> Json:
        text = self._engine.decode([id], skip_special_tokens=False)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _sampling_of(self, index: int) -> Sampling:
        seed = self._sampling.seed
        return (
            self._sampling
            if seed is None or index == 0
            else replace(self._sampling, seed=seed + index)
        )

    def _usage(self) -> Json:
        return usage_of(len(self._prompt_ids), sum(len(choice.tokens) for choice in self._choices))


def _sampling(request: ChatRequest, defaults: Json, max_tokens: int) -> Sampling:
    def setting(name: str, neutral: Any) -> Any:
        asked = getattr(request, name)
        return defaults.get(name, neutral) if asked is None else asked

    return Sampling(
        temperature=used_temperature(setting("temperature", 1.0)),
        top_p=setting("top_p", 1.0),
        top_k=max(setting("top_k", 0), 0),
        min_p=setting("min_p", 0.0),
        max_tokens=max_tokens,
        seed=request.seed,
        top_logprobs=request.top_logprobs or 0,
        ignore_eos=request.ignore_eos,
        live=bool(request.stream or request.stops),
    )


def _tool_deltas(index: int, call: Json) -> list[Json]:
    function = call["function"]
    opening = {
        "id": call["id"],
        "type": "function",
        "index": index,
        "function": {"name": function["name"]},
    }
    arguments = {"index": index, "function": {"arguments": function["arguments"]}}
    return [
        {"content": None, "tool_calls": [opening]},
        {"content": None, "tool_calls": [arguments]},
    ]


def version_spans(tokens: Sequence[Token]) -> list[Json]:
    """Which weights sampled which tokens: `{version, start, end}` over the response."""
    spans: list[Json] = []
    for at, token in enumerate(tokens):
        if not spans or spans[-1]["version"] != token.version:
            spans.append({"version": token.version, "start": at, "end": at})
        spans[-1]["end"] = at + 1
    return spans
