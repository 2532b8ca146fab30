"""Execute one /v1/chat/completions request on a TokenEngine. A TokenEngine is an engine that
samples tokens. The input is the validated request body. The output is the response body or the
stream chunks, in vLLM's format."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

import orjson

from fakevllm_adapters.formats.sse import DONE, encode
from fakevllm_adapters.http.complete_choices import SentChoice
from fakevllm_adapters.protocol.packed_numbers import id_bytes
from fakevllm_adapters.vllm_compat.chat_request import (
    ChatRequest,
    allowed_new_tokens,
    truncate_prompt,
)
from fakevllm_adapters.vllm_compat.chat_response import (
    FINGERPRINT,
    ChatWriter,
    Choice,
    assistant_message,
    new_response_id,
    usage_counts,
)
from fakevllm_server.backends.http.completion_choice import (
    Piece,
    SampledChoice,
    requested_allowed_sets,
    requested_token_ids,
    requested_version_spans,
    sample_choice,
    tokens_apart,
)
from fakevllm_server.backends.http.multiple_choices import (
    complete_all,
    drain,
    run_all,
    stream_all,
)
from fakevllm_server.backends.http.sampling_parameters import (
    check_model,
    sampling_for_choice,
    sampling_for_request,
)
from fakevllm_server.backends.http.tool_calls import create_parser
from fakevllm_server.types.backend import TokenEngine
from fakevllm_server.types.sampling import Token

Json = dict[str, Any]

_EMPTY_DELTA: Json = {}


class ChatCompletion:
    """One /v1/chat/completions request. Call one of `answer`, `chunks` and `complete_choices`,
    exactly once.

    The constructor raises WireError for a request that vLLM would refuse.
    """

    def __init__(
        self,
        engine: TokenEngine,
        request: ChatRequest,
        request_id: str | None,
        *,
        separates_prompt: bool = False,
        separates_choices: bool = False,
    ) -> None:
        """Check the request and tokenize its prompt. If `separates_prompt` is True, `answer` and
        `chunks` leave out the prompt's token ids. The caller must then send these ids
        (`separate_prompt`) before the response. If `separates_choices` is True, call
        `complete_choices` and no other method."""
        check_model(engine, request.model)
        self._engine = engine
        self._request = request
        self._prompt_ids = truncate_prompt(engine.render(request), request, engine.max_model_len)
        self.separate_prompt = id_bytes(self._prompt_ids) if separates_prompt else None
        """The prompt's token ids to send in front of the response, or None."""
        limit = allowed_new_tokens(
            len(self._prompt_ids), request.max_new_tokens, engine.max_model_len
        )
        self._sampling = sampling_for_request(request, engine.default_sampling, limit)
        engine.check(self._sampling)
        self._separates_choices = separates_choices
        self._choices = [
            SampledChoice(0 if separates_choices else number, number)
            for number in range(request.n or 1)
        ]
        self._writer = ChatWriter(
            new_response_id(request_id or request.request_id),
            int(time.time()),
            engine.model_name,
            FINGERPRINT,
        )

    async def answer(self) -> Json:
        """Sample all choices of the request, and return the response body."""
        await run_all([drain(self._pieces(choice)) for choice in self._choices])
        choices = [self._finished_choice(choice) for choice in self._choices]
        usage = self._usage(self._choices)
        return self._writer.completion(choices, usage, self._requested_prompt_ids())

    def chunks(self) -> AsyncGenerator[Json]:
        """Sample the choices of a streamed request. Yield each chunk of the response as soon as it
        is available."""
        choices = [self._chunks_of(choice) for choice in self._choices]
        return stream_all(choices, self._usage_chunk if self._request.include_usage else None)

    def complete_choices(self) -> AsyncGenerator[SentChoice]:
        """Sample all choices of the request. Yield each choice as soon as it is complete, as if the
        request had asked only for this choice."""
        return complete_all([self._complete(choice) for choice in self._choices])

    async def _complete(self, choice: SampledChoice) -> SentChoice:
        if self._request.stream:
            chunks = [chunk async for chunk in self._chunks_of(choice)]
            if self._request.include_usage:
                chunks.append(self._writer.usage_chunk(self._usage([choice])))
            answer = b"".join([*map(encode, chunks), DONE])
        else:
            await drain(self._pieces(choice))
            finished, ids = self._finished_choice(choice), self._requested_prompt_ids()
            answer = orjson.dumps(self._writer.completion([finished], self._usage([choice]), ids))
        tokens = tokens_apart(self._engine, self._request, choice)
        return SentChoice(choice.number, tokens, answer)

    async def _chunks_of(self, choice: SampledChoice) -> AsyncGenerator[Json]:
        parser = create_parser(self._request)
        has_role = False
        async with aclosing(self._pieces(choice)) as pieces:
            async for piece in pieces:
                if not has_role:
                    has_role = True
                    role = self._writer.role_chunk(choice.index, self._requested_prompt_ids())
                    yield self._with_usage(role, 0)
                deltas = parser.push(piece.text)
                if not deltas and piece.tokens and self._reports_tokens():
                    deltas = [_EMPTY_DELTA]
                tokens = piece.tokens
                for delta in deltas:
                    yield self._delta_chunk(choice, delta, tokens)
                    tokens = ()
        for delta in parser.flush():
            yield self._delta_chunk(choice, delta, ())
        self._set_tool_calls_reason(choice, parser.has_tool_call)
        finish = self._writer.finish_chunk(
            self._without_message(choice), {}, closes_stream=not self._request.include_usage
        )
        yield self._with_usage(finish, len(choice.tokens))

    def _pieces(self, choice: SampledChoice) -> AsyncGenerator[Piece]:
        sampling = sampling_for_choice(self._sampling, choice.number)
        return sample_choice(self._engine, self._request, self._prompt_ids, sampling, choice)

    def _finished_choice(self, choice: SampledChoice) -> Choice:
        content, calls = create_parser(self._request).parse_whole(choice.text)
        self._set_tool_calls_reason(choice, bool(calls))
        finished = self._without_message(choice)
        finished.message = assistant_message(content, calls)
        finished.logprobs = self._logprobs(choice.tokens)
        finished.token_ids = requested_token_ids(self._request, choice.tokens)
        return finished

    def _set_tool_calls_reason(self, choice: SampledChoice, has_tool_call: bool) -> None:
        """Change a choice's finish reason from "stop" to "tool_calls" if the choice has a tool
        call. As in OpenAI's API, the reason stays "stop" if the request's `tool_choice` names a
        tool."""
        is_stop = choice.finish_reason == "stop"
        if has_tool_call and is_stop and self._request.named_tool is None:
            choice.finish_reason = "tool_calls"

    def _without_message(self, choice: SampledChoice) -> Choice:
        return Choice(
            choice.index,
            {},
            choice.finish_reason,
            stop_reason=cast(Any, choice.stop_reason),
            weight_versions=requested_version_spans(self._request, choice.tokens),
            allowed_tokens=(
                None
                if self._separates_choices
                else requested_allowed_sets(self._engine, self._request, choice.tokens)
            ),
        )

    def _delta_chunk(self, choice: SampledChoice, delta: Json, tokens: Sequence[Token]) -> Json:
        ids = requested_token_ids(self._request, tokens)
        chunk = self._writer.delta_chunk(choice.index, delta, self._logprobs(tokens), ids)
        return self._with_usage(chunk, len(choice.tokens))

    def _with_usage(self, chunk: Json, num_sampled: int) -> Json:
        """Return a chunk of a stream. If the request has `continuous_usage_stats`, add the choice's
        token usage so far. `num_sampled` is the number of tokens sampled so far. As in vLLM, the
        key `usage` follows the key `choices`."""
        if not self._request.wants_continuous_usage:
            return chunk
        usage = usage_counts(len(self._prompt_ids), num_sampled) | {
            "completion_tokens_details": None
        }
        keys = list(chunk)
        end = keys.index("choices") + 1
        return {key: chunk[key] for key in keys[:end]} | {"usage": usage} | chunk

    def _reports_tokens(self) -> bool:
        return self._reports_logprobs() or bool(self._request.return_token_ids)

    def _reports_logprobs(self) -> bool:
        # vLLM prints no logprobs if the app sets `top_logprobs` to null.
        request = self._request
        has_null = "top_logprobs" in request.model_fields_set and request.top_logprobs is None
        return bool(request.logprobs) and not has_null

    def _requested_prompt_ids(self) -> list[int] | None:
        is_requested = self._request.return_token_ids and (
            self.separate_prompt is None or self._separates_choices
        )
        return self._prompt_ids if is_requested else None

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if not self._reports_logprobs() or not tokens:
            return None
        return {"content": [self._logprob_entry(token) for token in tokens]}

    def _logprob_entry(self, token: Token) -> Json:
        top = [self._token_entry(id, logprob) for id, logprob in token.top]
        return self._token_entry(token.id, token.logprob) | {"top_logprobs": top}

    def _token_entry(self, id: int, logprob: float) -> Json:
        text = self._engine.decode([id], skip_special_tokens=False)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _usage_chunk(self) -> Json:
        return self._writer.usage_chunk(self._usage(self._choices))

    def _usage(self, choices: Sequence[SampledChoice]) -> Json:
        return usage_counts(len(self._prompt_ids), sum(len(choice.tokens) for choice in choices))
