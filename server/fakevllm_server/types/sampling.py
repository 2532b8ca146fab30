"""Parameters for sampling, and sampled tokens. The HTTP layer passes the parameters to an engine,
and the engine returns the tokens."""

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
    """Version of the weights that sampled the token."""
    top: list[tuple[int, float]]
    """The `Sampling.top_logprobs` most likely tokens as (id, logprob), most likely first."""
    allowed: bytes | None = None
    """Packed set (`types/token_masks.py`) from which the token was sampled. None if it was sampled
    from the whole vocabulary, or if `Sampling.reports_allowed` is false."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters for sampling one completion. Temperature 0 means greedy sampling. The value 0 for
    `top_k` or `min_p` excludes no tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    seed: int | None = None
    top_logprobs: int = 0
    ignore_eos: bool = False
    live: bool = False
    """Whether the caller needs each token as soon as it is sampled. If false, the engine may yield
    all tokens at once at the end."""
    frequency_penalty: float = 0.0
    """Penalty on tokens by their number of occurrences in the answer. The prompt does not count."""
    presence_penalty: float = 0.0
    """Penalty on tokens that occur in the answer. The prompt does not count."""
    repetition_penalty: float = 1.0
    """Penalty on tokens that occur in the prompt or in the answer."""
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    min_tokens: int = 0
    """Number of tokens that must be sampled before an end-of-sequence token or a stop id may be
    sampled."""
    stop_ids: frozenset[int] = frozenset()
    """Token ids that end the answer, as the end-of-sequence token does."""
    bad_words: tuple[str, ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    """The only token ids that may be sampled. None means the whole vocabulary."""
    grammar: Grammar | None = None
    """Grammar that the whole answer must match."""
    reports_allowed: bool = False
    """Whether the caller needs, with each token, the set that the token was sampled from."""


def effective_temperature(temperature: float) -> float:
    """Return the temperature that an engine really uses if a request asks for `temperature`.

    A temperature below MIN_TEMPERATURE is raised to MIN_TEMPERATURE, because the logits divided by
    a smaller temperature would overflow. Temperature 0 is not raised, because it means greedy
    sampling.
    """
    return 0.0 if temperature == 0 else max(temperature, MIN_TEMPERATURE)


MIN_TEMPERATURE = 0.01
"""vLLM's minimum temperature (`SamplingParams`) for sampling that is not greedy."""
