"""One chat request on a TokenEngine: from validated body to answer or chunks, as vLLM would write
them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

from fakevllm_adapters.vllm_compat.chat_request import (
    ChatRequest,
    allowed_new_tokens,
    truncate_prompt,
)
from fakevllm_adapters.vllm_compat.chat_response import (
    ChatWriter,
    Choice,
    assistant_message,
    new_response_id,
    usage_counts,
)
from fakevllm_server.backends.http.pieces import (
    Piece,
    Progress,
    drained,
    sampled,
    shown_allowed,
    shown_ids,
    shown_spans,
    streamed,
    together,
)
from fakevllm_server.backends.http.requested_sampling import check_model, sampling_asked, seeded
from fakevllm_server.backends.http.tool_stream import reader_of
from fakevllm_server.types.backend import TokenEngine
from fakevllm_server.types.sampling import Token

Json = dict[str, Any]

FINGERPRINT = "vllm-fakevllm-0"
_NOTHING: Json = {}


class Completion:
    """The life of one request. Construction raises WireError for what vLLM would refuse."""

    def __init__(self, engine: TokenEngine, request: ChatRequest, request_id: str | None) -> None:
        check_model(engine, request.model)
        self._engine = engine
        self._request = request
        self._prompt_ids = truncate_prompt(engine.render(request), request, engine.max_model_len)
        limit = allowed_new_tokens(
            len(self._prompt_ids), request.max_new_tokens, engine.max_model_len
        )
        self._sampling = sampling_asked(request, engine.default_sampling, limit)
        engine.check(self._sampling)
        self._choices = [Progress(index) for index in range(request.n or 1)]
        self._writer = ChatWriter(
            new_response_id(request_id or request.request_id),
            int(time.time()),
            engine.model_name,
            FINGERPRINT,
        )

    async def answer(self) -> Json:
        await together([drained(self._pieces(choice)) for choice in self._choices])
        choices = [self._finished(choice) for choice in self._choices]
        return self._writer.completion(choices, self._usage(), self._shown_prompt())

    def chunks(self) -> AsyncGenerator[Json]:
        choices = [self._chunks_of(choice) for choice in self._choices]
        return streamed(choices, self._usage_chunk if self._request.include_usage else None)

    async def _chunks_of(self, choice: Progress) -> AsyncGenerator[Json]:
        reader = reader_of(self._request)
        opened = False
        async with aclosing(self._pieces(choice)) as pieces:
            async for piece in pieces:
                if not opened:
                    opened = True
                    role = self._writer.role_chunk(choice.index, self._shown_prompt())
                    yield self._with_usage(role, 0)
                deltas = reader.push(piece.text)
                if not deltas and piece.tokens and self._shows_tokens():
                    deltas = [_NOTHING]
                tokens = piece.tokens
                for delta in deltas:
                    yield self._delta(choice, delta, tokens)
                    tokens = ()
        for delta in reader.flush():
            yield self._delta(choice, delta, ())
        self._call_for_tools(choice, reader.called)
        last = self._closing(choice)
        closes_stream = not self._request.include_usage
        finish = self._writer.finish_chunk(last, {}, closes_stream=closes_stream)
        yield self._with_usage(finish, len(choice.tokens))

    def _pieces(self, choice: Progress) -> AsyncGenerator[Piece]:
        sampling = seeded(self._sampling, choice.index)
        return sampled(self._engine, self._request, self._prompt_ids, sampling, choice)

    def _finished(self, choice: Progress) -> Choice:
        content, calls = reader_of(self._request).whole(choice.text)
        self._call_for_tools(choice, bool(calls))
        closed = self._closing(choice)
        closed.message = assistant_message(content, calls)
        closed.logprobs = self._logprobs(choice.tokens)
        closed.token_ids = shown_ids(self._request, choice.tokens)
        return closed

    def _call_for_tools(self, choice: Progress, called: bool) -> None:
        """A call of the one tool asked for by name ends in "stop", as in OpenAI's API."""
        if called and choice.finish_reason == "stop" and self._request.named_tool is None:
            choice.finish_reason = "tool_calls"

    def _closing(self, choice: Progress) -> Choice:
        return Choice(
            choice.index,
            {},
            choice.finish_reason,
            stop_reason=cast(Any, choice.stop_reason),
            weight_versions=shown_spans(self._request, choice.tokens),
            allowed_tokens=shown_allowed(self._engine, self._request, choice.tokens),
        )

    def _delta(self, choice: Progress, delta: Json, tokens: Sequence[Token]) -> Json:
        chunk = self._writer.delta_chunk(
            choice.index, delta, self._logprobs(tokens), shown_ids(self._request, tokens)
        )
        return self._with_usage(chunk, len(choice.tokens))

    def _with_usage(self, chunk: Json, num_sampled: int) -> Json:
        """Where asked for, each chunk tells its choice's usage so far, right after the choices."""
        if not self._request.wants_continuous_usage:
            return chunk
        usage = usage_counts(len(self._prompt_ids), num_sampled) | {
            "completion_tokens_details": None
        }
        keys = list(chunk)
        end = keys.index("choices") + 1
        return {key: chunk[key] for key in keys[:end]} | {"usage": usage} | chunk

    def _shows_tokens(self) -> bool:
        return bool(self._request.logprobs or self._request.return_token_ids)

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

    def _usage_chunk(self) -> Json:
        return self._writer.usage_chunk(self._usage())

    def _usage(self) -> Json:
        return usage_counts(
            len(self._prompt_ids), sum(len(choice.tokens) for choice in self._choices)
        )
