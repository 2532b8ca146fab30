"""Execute one /v1/completions request on a TokenEngine. A TokenEngine is an engine that samples
tokens. The input is the validated request body. The output is the response body or the stream
chunks, in vLLM's format."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson

from fakevllm_adapters.formats.sse import DONE, encode
from fakevllm_adapters.http.complete_choices import SentChoice
from fakevllm_adapters.protocol.packed_numbers import id_bytes
from fakevllm_adapters.vllm_compat.chat_request import (
    allowed_new_tokens,
    fit_prompt_text,
    truncate_prompt,
)
from fakevllm_adapters.vllm_compat.chat_response import FINGERPRINT, usage_counts
from fakevllm_adapters.vllm_compat.completions import (
    CompletionRequest,
    CompletionWriter,
    Prompt,
    TextChoice,
    legacy_logprobs,
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
from fakevllm_server.types.backend import TokenEngine
from fakevllm_server.types.sampling import Sampling, Token

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """One prompt of a /v1/completions request, as token ids."""

    ids: list[int]
    text: str
    """The prompt's text, which the answer repeats if the request has `echo`."""


@dataclass(slots=True)
class Continuation:
    """One sampled continuation of a prompt, which is one choice of the response."""

    prompt: EncodedPrompt
    sampling: Sampling
    choice: SampledChoice

    @property
    def is_over(self) -> bool:
        """True if the sampling of this continuation has ended. The continuation may still yield
        text after that. Such text was held back, because it might have become a stop string."""
        is_full = len(self.choice.tokens) >= self.sampling.max_tokens
        return is_full or self.choice.finish_reason == "stop"


@dataclass(slots=True)
class _PendingChunk:
    """Text and tokens of one continuation (sampled answer) that will be sent in the next chunk."""

    num_chars_before: int = 0
    """Number of characters in the earlier chunks, for the text offsets of the logprobs."""
    text: str = ""
    tokens: list[Token] = field(default_factory=list[Token])
    is_first: bool = True

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens.extend(piece.tokens)

    def next(self) -> _PendingChunk:
        """Return a new, empty chunk that begins after the tokens and the text of this chunk."""
        return _PendingChunk(self.num_chars_before + len(self.text), is_first=False)


class TextCompletion:
    """One /v1/completions request. Call one of `answer`, `chunks` and `complete_choices`, exactly
    once.

    The constructor raises WireError for a request that vLLM would refuse.
    """

    def __init__(
        self,
        engine: TokenEngine,
        request: CompletionRequest,
        request_id: str | None,
        *,
        separates_prompt: bool = False,
        separates_choices: bool = False,
    ) -> None:
        """Check the request and tokenize its prompts. If `separates_prompt` is True and there is
        only one prompt, the caller must send `separate_prompt` (the prompt's token ids) before the
        response. `answer` and `chunks` then leave these ids out. If `separates_choices` is True,
        call `complete_choices` and no other method."""
        self._engine = engine
        self._request = request
        self._common = common = request.common
        check_model(engine, common.model)
        self._prompts = [self._encode(prompt) for prompt in request.prompts]
        is_separate = separates_prompt and len(self._prompts) == 1
        self.separate_prompt = id_bytes(self._prompts[0].ids) if is_separate else None
        """The prompt's token ids to send in front of the response, or None."""
        self._separates_choices = separates_choices
        self._reports_prompt_ids = bool(common.return_token_ids) and (
            separates_choices or not is_separate
        )
        self._continuations = [
            continuation
            for prompt in self._prompts
            for continuation in self._create_continuations(prompt)
        ]
        for number, continuation in enumerate(self._continuations):
            continuation.choice.number = number
            continuation.choice.index = 0 if separates_choices else number
        self._writer = CompletionWriter(
            f"cmpl-{request_id or common.request_id or secrets.token_hex(8)}",
            int(time.time()),
            engine.model_name,
            FINGERPRINT,
        )

    async def answer(self) -> Json:
        """Sample all choices of the request, and return the response body."""
        await run_all([drain(self._pieces(each)) for each in self._continuations])
        choices = [self._whole_choice(each) for each in self._continuations]
        return self._writer.completion(choices, self._usage(self._continuations, self._prompts))

    def chunks(self) -> AsyncGenerator[Json]:
        """Sample the choices of a streamed request. Yield each chunk of the response as soon as it
        is available."""
        streams = [self._chunks_of(each) for each in self._continuations]
        return stream_all(streams, self._usage_chunk if self._common.include_usage else None)

    def complete_choices(self) -> AsyncGenerator[SentChoice]:
        """Sample all choices of the request. Yield each choice as soon as it is complete, as if the
        request had asked only for this choice."""
        return complete_all([self._complete(each) for each in self._continuations])

    async def _complete(self, continuation: Continuation) -> SentChoice:
        choice = continuation.choice
        if self._common.stream:
            chunks = [chunk async for chunk in self._chunks_of(continuation)]
            if self._common.include_usage:
                chunks.append(self._writer.usage_chunk(self._usage_of(continuation)))
            answer = b"".join([*map(encode, chunks), DONE])
        else:
            await drain(self._pieces(continuation))
            whole = self._whole_choice(continuation)
            answer = orjson.dumps(self._writer.completion([whole], self._usage_of(continuation)))
        return SentChoice(choice.number, tokens_apart(self._engine, self._common, choice), answer)

    def _encode(self, prompt: Prompt) -> EncodedPrompt:
        engine, common = self._engine, self._common
        if isinstance(prompt, str):
            fitting = fit_prompt_text(prompt, common, engine.max_model_len, engine.max_prompt_bytes)
            text, ids = prompt, engine.encode(fitting, self._request.add_special_tokens)
        else:
            text, ids = "", prompt
            if self._request.echo:
                text = engine.decode(prompt, skip_special_tokens=False)
        if common.return_token_ids:
            text = ""  # vLLM reports the prompt's ids instead of its text
        return EncodedPrompt(truncate_prompt(ids, common, engine.max_model_len), text)

    def _create_continuations(self, prompt: EncodedPrompt) -> list[Continuation]:
        limit = allowed_new_tokens(
            len(prompt.ids), self._request.max_new_tokens, self._engine.max_model_len
        )
        sampling = sampling_for_request(self._common, self._engine.default_sampling, limit)
        self._engine.check(sampling)
        return [
            Continuation(prompt, sampling_for_choice(sampling, index), SampledChoice(index, index))
            for index in range(self._common.n or 1)
        ]

    def _pieces(self, continuation: Continuation) -> AsyncGenerator[Piece]:
        ids, sampling = continuation.prompt.ids, continuation.sampling
        return sample_choice(self._engine, self._common, ids, sampling, continuation.choice)

    async def _chunks_of(self, continuation: Continuation) -> AsyncGenerator[Json]:
        """Yield the chunks of one continuation (one sampled answer), one for each engine iteration.

        The last chunk is yielded after sampling has ended. It contains the finish reason, and the
        text that was held back because it might have become a stop string.
        """
        pending = _PendingChunk()
        async with aclosing(self._pieces(continuation)) as pieces:
            async for piece in pieces:
                pending.add(piece)
                if continuation.is_over:
                    continue
                yield self._chunk(continuation, pending)
                pending = pending.next()
        yield self._chunk(continuation, pending, is_last=True)

    def _chunk(
        self, continuation: Continuation, pending: _PendingChunk, *, is_last: bool = False
    ) -> Json:
        choice, prompt, text = continuation.choice, continuation.prompt, pending.text
        has_echo = pending.is_first and self._request.echo
        has_prompt_ids = has_echo or (pending.is_first and self._reports_prompt_ids)
        piece = TextChoice(
            index=choice.index,
            text=self._text_with_echo(prompt, text) if has_echo else text,
            logprobs=self._logprobs(pending.tokens, pending.num_chars_before),
            finish_reason=choice.finish_reason if is_last else None,
            stop_reason=choice.stop_reason if is_last else None,
            prompt_ids=prompt.ids if has_prompt_ids else None,
            token_ids=requested_token_ids(self._common, pending.tokens),
            weight_versions=(
                requested_version_spans(self._common, choice.tokens) if is_last else None
            ),
            allowed_tokens=self._allowed_sets(choice.tokens) if is_last else None,
        )
        has_usage = self._common.wants_continuous_usage
        usage = self._usage_of(continuation) if has_usage else None
        return self._writer.chunk(piece, usage, closes_stream=not self._common.include_usage)

    def _whole_choice(self, continuation: Continuation) -> TextChoice:
        choice, prompt = continuation.choice, continuation.prompt
        text = choice.text
        return TextChoice(
            index=choice.index,
            text=self._text_with_echo(prompt, text) if self._request.echo else text,
            logprobs=self._logprobs(choice.tokens, 0),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            prompt_ids=prompt.ids if self._reports_prompt_ids else None,
            token_ids=requested_token_ids(self._common, choice.tokens),
            weight_versions=requested_version_spans(self._common, choice.tokens),
            allowed_tokens=self._allowed_sets(choice.tokens),
        )

    def _allowed_sets(self, tokens: Sequence[Token]) -> Json | None:
        if self._separates_choices:
            return None
        return requested_allowed_sets(self._engine, self._common, tokens)

    def _text_with_echo(self, prompt: EncodedPrompt, text: str) -> str:
        return prompt.text + ("" if self._request.is_echo_only else text)

    def _logprobs(self, tokens: Sequence[Token], num_chars_before: int) -> Json | None:
        if self._request.logprobs is None:
            return None
        return legacy_logprobs([self._logprob_entry(token) for token in tokens], num_chars_before)

    def _logprob_entry(self, token: Token) -> tuple[str, float, dict[str, float]]:
        likeliest = {token.id: token.logprob} | dict(token.top)
        top_logprobs = {self._token_text(id): logprob for id, logprob in likeliest.items()}
        return self._token_text(token.id), token.logprob, top_logprobs

    def _token_text(self, id: int) -> str:
        if self._request.returns_tokens_as_ids:
            return f"token_id:{id}"
        return self._engine.decode([id], skip_special_tokens=False)

    def _usage_chunk(self) -> Json:
        return self._writer.usage_chunk(self._usage(self._continuations, self._prompts))

    def _usage_of(self, continuation: Continuation) -> Json:
        return self._usage([continuation], [continuation.prompt])

    def _usage(
        self, continuations: Sequence[Continuation], prompts: Sequence[EncodedPrompt]
    ) -> Json:
        return usage_counts(
            sum(len(prompt.ids) for prompt in prompts),
            sum(len(each.choice.tokens) for each in continuations),
        )
