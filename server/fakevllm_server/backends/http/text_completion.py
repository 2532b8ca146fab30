"""One /v1/completions request on a TokenEngine: from validated body to answer or chunks, as vLLM
would write them."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fakevllm_adapters.vllm_compat.chat_request import allowed_new_tokens, truncate_prompt
from fakevllm_adapters.vllm_compat.chat_response import usage_counts
from fakevllm_adapters.vllm_compat.completions import (
    CompletionRequest,
    CompletionWriter,
    Prompt,
    TextChoice,
    legacy_logprobs,
)
from fakevllm_server.backends.http.completion import FINGERPRINT
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
from fakevllm_server.types.backend import TokenEngine
from fakevllm_server.types.sampling import Sampling, Token

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    ids: list[int]
    text: str
    """What an echo of it shows."""


@dataclass(slots=True)
class Choice:
    """One of a prompt's continuations."""

    prompt: ReadPrompt
    sampling: Sampling
    progress: Progress

    @property
    def is_over(self) -> bool:
        """Nothing more will be sampled; text held back may still come."""
        is_full = len(self.progress.tokens) >= self.sampling.max_tokens
        return is_full or self.progress.finish_reason == "stop"


class TextCompletion:
    """The life of one request. Construction raises WireError for what vLLM would refuse."""

    def __init__(
        self, engine: TokenEngine, request: CompletionRequest, request_id: str | None
    ) -> None:
        self._engine = engine
        self._request = request
        self._common = common = request.common
        check_model(engine, common.model)
        self._prompts = [self._read(prompt) for prompt in request.prompts]
        self._choices = [choice for prompt in self._prompts for choice in self._begun(prompt)]
        for index, choice in enumerate(self._choices):
            choice.progress.index = index
        self._writer = CompletionWriter(
            f"cmpl-{request_id or common.request_id or secrets.token_hex(8)}",
            int(time.time()),
            engine.model_name,
            FINGERPRINT,
        )

    async def answer(self) -> Json:
        await together([drained(self._pieces(choice)) for choice in self._choices])
        whole = [self._whole(choice) for choice in self._choices]
        return self._writer.completion(whole, self._usage(self._choices, self._prompts))

    def chunks(self) -> AsyncGenerator[Json]:
        choices = [self._chunks_of(choice) for choice in self._choices]
        return streamed(choices, self._usage_chunk if self._common.include_usage else None)

    def _read(self, prompt: Prompt) -> ReadPrompt:
        if isinstance(prompt, str):
            text, ids = prompt, self._engine.encode(prompt, self._request.add_special_tokens)
        else:
            text, ids = "", prompt
            if self._request.echo:
                text = self._engine.decode(prompt, skip_special_tokens=False)
        if self._common.return_token_ids:
            text = ""  # vLLM has the ids stand for it
        return ReadPrompt(truncate_prompt(ids, self._common, self._engine.max_model_len), text)

    def _begun(self, prompt: ReadPrompt) -> list[Choice]:
        limit = allowed_new_tokens(
            len(prompt.ids), self._request.max_new_tokens, self._engine.max_model_len
        )
        sampling = sampling_asked(self._common, self._engine.default_sampling, limit)
        self._engine.check(sampling)
        return [
            Choice(prompt, seeded(sampling, nth), Progress(nth))
            for nth in range(self._common.n or 1)
        ]

    def _pieces(self, choice: Choice) -> AsyncGenerator[Piece]:
        ids = choice.prompt.ids
        return sampled(self._engine, self._common, ids, choice.sampling, choice.progress)

    async def _chunks_of(self, choice: Choice) -> AsyncGenerator[Json]:
        """One for each iteration of the engine; the last says why it is the last, and so waits
        for the text that was held back."""
        text, tokens = "", list[Token]()
        num_chars = 0
        is_first = True
        async with aclosing(self._pieces(choice)) as pieces:
            async for piece in pieces:
                text, tokens = text + piece.text, [*tokens, *piece.tokens]
                if choice.is_over:
                    continue
                yield self._chunk(choice, text, tokens, num_chars, is_first=is_first)
                num_chars += len(text)
                text, tokens, is_first = "", [], False
        yield self._chunk(choice, text, tokens, num_chars, is_first=is_first, is_last=True)

    def _chunk(
        self,
        choice: Choice,
        text: str,
        tokens: Sequence[Token],
        num_chars: int,
        *,
        is_first: bool,
        is_last: bool = False,
    ) -> Json:
        """`num_chars`: of the text before it."""
        progress = choice.progress
        echoes = is_first and self._request.echo
        shows_prompt = echoes or (is_first and self._common.return_token_ids)
        piece = TextChoice(
            index=progress.index,
            text=self._shown_text(choice, text) if echoes else text,
            logprobs=self._logprobs(tokens, num_chars),
            finish_reason=progress.finish_reason if is_last else None,
            stop_reason=progress.stop_reason if is_last else None,
            prompt_ids=choice.prompt.ids if shows_prompt else None,
            token_ids=shown_ids(self._common, tokens),
            weight_versions=shown_spans(self._common, progress.tokens) if is_last else None,
            allowed_tokens=self._allowed(progress.tokens) if is_last else None,
        )
        usage = (
            self._usage([choice], [choice.prompt]) if self._common.wants_continuous_usage else None
        )
        return self._writer.chunk(piece, usage, closes_stream=not self._common.include_usage)

    def _whole(self, choice: Choice) -> TextChoice:
        progress = choice.progress
        shows_prompt = self._common.return_token_ids
        return TextChoice(
            index=progress.index,
            text=self._shown_text(choice, progress.text) if self._request.echo else progress.text,
            logprobs=self._logprobs(progress.tokens, 0),
            finish_reason=progress.finish_reason,
            stop_reason=progress.stop_reason,
            prompt_ids=choice.prompt.ids if shows_prompt else None,
            token_ids=shown_ids(self._common, progress.tokens),
            weight_versions=shown_spans(self._common, progress.tokens),
            allowed_tokens=self._allowed(progress.tokens),
        )

    def _allowed(self, tokens: Sequence[Token]) -> Json | None:
        return shown_allowed(self._engine, self._common, tokens)

    def _shown_text(self, choice: Choice, text: str) -> str:
        return choice.prompt.text + ("" if self._request.is_echo_only else text)

    def _logprobs(self, tokens: Sequence[Token], num_chars: int) -> Json | None:
        if self._request.logprobs is None:
            return None
        return legacy_logprobs([self._entry(token) for token in tokens], num_chars)

    def _entry(self, token: Token) -> tuple[str, float, dict[str, float]]:
        likeliest = {token.id: token.logprob} | dict(token.top)
        tops = {self._name(id): logprob for id, logprob in likeliest.items()}
        return self._name(token.id), token.logprob, tops

    def _name(self, id: int) -> str:
        if self._request.returns_tokens_as_ids:
            return f"token_id:{id}"
        return self._engine.decode([id], skip_special_tokens=False)

    def _usage_chunk(self) -> Json:
        return self._writer.usage_chunk(self._usage(self._choices, self._prompts))

    def _usage(self, choices: Sequence[Choice], prompts: Sequence[ReadPrompt]) -> Json:
        return usage_counts(
            sum(len(prompt.ids) for prompt in prompts),
            sum(len(choice.progress.tokens) for choice in choices),
        )
