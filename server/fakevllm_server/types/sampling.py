"""How one completion is sampled, and what comes of it: the words between HTTP and an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fakevllm_adapters.vllm_compat.grammar import Grammar


class Token(NamedTuple):
    """One sampled token."""

    id: int
    logprob: float
    version: int
    top: list[tuple[int, float]]
    """The likeliest (id, logprob), best first, as many as were asked for."""
    allowed: bytes | None = None
    """The packed set (allowed.py) it was chosen from; None: all of the vocabulary, or not asked."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one completion is sampled. Temperature 0 is greedy; top_k 0 and min_p 0 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    seed: int | None = None
    top_logprobs: int = 0
    ignore_eos: bool = False
    live: bool = False
    """Tokens are wanted as they come; otherwise the engine may hand them over all at once."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Of prompt and answer; the other two count the answer alone."""
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    min_tokens: int = 0
    """Before them neither the end of sequence nor a stop id may come."""
    stop_ids: frozenset[int] = frozenset()
    """End the answer as the end of sequence does."""
    bad_words: tuple[str, ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    """None: all of the vocabulary."""
    grammar: Grammar | None = None
    """What the whole answer must be."""
    reports_allowed: bool = False
    """Each token is wanted with the set it was chosen from."""


def effective_temperature(asked: float) -> float:
    """What an engine samples with: below MIN_TEMPERATURE, logits overflow."""
    return 0.0 if asked == 0 else max(asked, MIN_TEMPERATURE)


MIN_TEMPERATURE = 0.01
"""vLLM's floor (`SamplingParams`); 0 means greedy and stays."""
