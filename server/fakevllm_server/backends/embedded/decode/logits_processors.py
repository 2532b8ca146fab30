"""Change the logits of single requests before temperature, top-k, top-p and min-p are applied.

The changes are made by the grammar, allowed token ids, bad words, the minimum length, the logit
bias and penalties, in vLLM's order. Requests without these settings are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fakevllm_server.backends.embedded.decode.grammar import GrammarMatcher
from fakevllm_server.types.sampling import Sampling

NEVER = float("-inf")


def needs_logits_processor(sampling: Sampling) -> bool:
    """Return True if the sampling parameters include a grammar, allowed token ids, bad words, a
    minimum length, a logit bias or a penalty."""
    return (
        sampling.grammar is not None
        or sampling.allowed_ids is not None
        or bool(sampling.bad_words or sampling.logit_bias or sampling.min_tokens)
        or _penalised(sampling)
    )


class LogitsProcessor:
    """The settings of one request that change its logits, and the tokens that the request has
    sampled so far. Use a processor on the engine thread only. Its tensors are on the device of the
    logits."""

    def __init__(
        self,
        sampling: Sampling,
        prompt_ids: Sequence[int],
        eos_ids: frozenset[int],
        bad_words: Sequence[Sequence[int]] = (),
        matcher: GrammarMatcher | None = None,
    ) -> None:
        """Create the processor of one request. `bad_words` has the token ids of each bad word."""
        self._sampling = sampling
        self._prompt_ids = list(prompt_ids)
        self._eos_ids = eos_ids
        self._bad_words = [list(word) for word in bad_words]
        self._matcher = matcher
        self._sampled: list[int] = []
        self._is_penalised = _penalised(sampling)
        self._counts: Tensor | None = None
        """[vocabulary] How often each token is in the answer."""
        self._in_prompt: Tensor | None = None
        """[vocabulary] Whether a token is in the prompt."""
        self._forbidden: Tensor | None = None
        """[vocabulary] Whether a token is not among the allowed ids."""
        self._bias: Tensor | None = None
        """[vocabulary] The logit bias of each token."""

    def take(self, token_id: int) -> None:
        """Record a sampled token, so that the penalties, bad words, grammar and minimum length take
        it into account."""
        self._sampled.append(token_id)
        if self._matcher is not None:
            self._matcher.take(token_id)
        if self._counts is not None:
            self._counts[token_id] += 1

    def apply(self, logits: Tensor) -> None:
        """Change `logits`, [vocabulary] of float32, in place. If the request's settings together
        exclude every token, allow an end-of-sequence token, so that a token can be sampled."""
        self._mask(logits)
        if self._sampling.logit_bias:
            if self._bias is None:
                self._bias = torch.zeros_like(logits)
                ids = list(self._sampling.logit_bias)
                biases = list(self._sampling.logit_bias.values())
                self._bias[ids] = torch.tensor(biases, dtype=logits.dtype, device=logits.device)
            logits.add_(self._bias)
        if self._is_penalised:
            self._penalise(logits)
        if not (logits > NEVER).any():
            logits[min(self._eos_ids, default=0)] = 0.0

    def _mask(self, logits: Tensor) -> None:
        allowed = self._matcher.allowed() if self._matcher is not None else None
        if allowed is not None:
            logits.masked_fill_(~allowed.to(logits.device), NEVER)
        if self._sampling.allowed_ids is not None:
            if self._forbidden is None:
                self._forbidden = torch.ones_like(logits, dtype=torch.bool)
                self._forbidden[list(self._sampling.allowed_ids)] = False
            logits.masked_fill_(self._forbidden, NEVER)
        for word in self._bad_words:
            begun = word[:-1]
            if self._sampled[len(self._sampled) - len(begun) :] == begun:
                logits[word[-1]] = NEVER
        if len(self._sampled) < self._sampling.min_tokens:
            ends = self._eos_ids | self._sampling.stop_ids
            logits[[id for id in ends if 0 <= id < len(logits)]] = NEVER

    def _penalise(self, logits: Tensor) -> None:
        if self._counts is None or self._in_prompt is None:
            self._counts = _counts(self._sampled, logits)
            self._in_prompt = _counts(self._prompt_ids, logits) > 0
        counts, in_answer = self._counts, self._counts > 0
        repetition = self._sampling.repetition_penalty
        seen = self._in_prompt | in_answer
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits.copy_(torch.where(seen, penalised, logits))
        logits.sub_(self._sampling.frequency_penalty * counts)
        logits.sub_(self._sampling.presence_penalty * in_answer)


def process_logits(logits: Tensor, processors: Sequence[tuple[int, LogitsProcessor]]) -> Tensor:
    """Return a float32 copy of `logits`, [rows, vocabulary], that the processors have changed.
    `processors` has pairs (row index, processor of this row)."""
    copied = logits.to(torch.float32, copy=True)
    for row, processor in processors:
        processor.apply(copied[row])
    return copied


def _penalised(sampling: Sampling) -> bool:
    return (
        bool(sampling.frequency_penalty or sampling.presence_penalty)
        or sampling.repetition_penalty != 1
    )


def _counts(ids: Sequence[int], logits: Tensor) -> Tensor:
    tokens = torch.tensor(ids, dtype=torch.long, device=logits.device)
    return torch.bincount(tokens, minlength=len(logits)).to(torch.float32)
