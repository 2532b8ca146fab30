"""One captured LLM call, and what a finished group or episode hands to training. Data only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fakevllm_adapters.protocol.packed_numbers import (
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from fakevllm_adapters.protocol.swarm import CapturedCall
from fakevllm_server.types.token_masks import TokenMasks

MAX_ID = 2**31 - 1
"""Ids and versions travel to the trainer in 32 bits."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a response were sampled by `version`. Where spans overlap, one of
    their versions sampled each of the tokens, and it is not known which."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """What the engine saw and sampled in one call."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float] | None
    versions: Sequence[VersionSpan]
    temperature: float
    finish_reason: str | None
    untrainable: str | None
    """Why the loss must not see it; None where it trains."""
    allowed: TokenMasks | None = None
    """What each token was chosen from; None: all of the vocabulary. It goes to the trainer, and not
    to the proxy: nothing in the ledger needs it, and it may be larger than the call."""

    @property
    def num_trained(self) -> int:
        """Tokens that could have been others."""
        return len(self.response_ids) - (self.allowed.num_forced if self.allowed else 0)

    @property
    def num_tokens(self) -> int:
        """That are held for it."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def version(self) -> int:
        return min((span.version for span in self.versions), default=0)

    def to_wire(self) -> CapturedCall:
        return CapturedCall(
            prompt_ids=pack_ids(self.prompt_ids),
            response_ids=pack_ids(self.response_ids),
            logprobs=None if self.logprobs is None else pack_floats(self.logprobs),
            weight_versions=[[span.version, span.start, span.end] for span in self.versions],
            temperature=self.temperature,
            finish_reason=self.finish_reason,
            untrainable=self.untrainable,
            shaped=self.allowed is not None,
        )

    @staticmethod
    def from_wire(call: CapturedCall) -> RecordedCall:
        """The call a `to_wire` told. Raises ValueError where its parts do not fit together, or it
        cannot be told that way."""
        if call.shaped:
            raise ValueError("what its tokens were chosen from is not known any more")
        response_ids = unpack_ids(call.response_ids)
        logprobs = None if call.logprobs is None else unpack_floats(call.logprobs)
        spans = [VersionSpan(*span) for span in call.weight_versions if len(span) == 3]
        prompt_ids = unpack_ids(call.prompt_ids)
        fits = logprobs is None or len(logprobs) == len(response_ids)
        fits = fits and len(spans) == len(call.weight_versions) > 0
        fits = fits and all(0 <= one.start <= one.end <= len(response_ids) for one in spans)
        fits = fits and all(0 <= one.version <= MAX_ID for one in spans)
        fits = fits and bool(prompt_ids) and min(prompt_ids + response_ids) >= 0
        if not fits or (call.untrainable is None and call.temperature <= 0):
            raise ValueError("its ids, log-probabilities and weight versions do not fit together")
        if not all(map(math.isfinite, [call.temperature, *(logprobs or ())])):
            raise ValueError("its temperature and log-probabilities are not all numbers")
        return RecordedCall(
            prompt_ids,
            response_ids,
            logprobs,
            spans,
            call.temperature,
            call.finish_reason,
            call.untrainable,
        )


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """An episode with its reward; `index` tells it apart inside its group."""

    index: int
    reward: float | None
    calls: Sequence[RecordedCall]
    owner: str = ""
    """The sibling or the claim its calls were made by."""

    @property
    def trains(self) -> bool:
        return self.reward is not None and any(call.untrainable is None for call in self.calls)

    @property
    def is_greedy(self) -> bool:
        return {call.temperature for call in self.calls} == {0.0}


TASK = "task:"


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """Episodes whose rewards are compared with each other."""

    group_id: str
    episodes: Sequence[ScoredEpisode]
    follows: RecordedCall | None = None
    """The served call that its conversation goes on from, where that is known here."""
    advantage: float | None = None
    """Of a feedback sample: given from outside, its one episode is compared with no other."""

    @property
    def task_id(self) -> str:
        """Which the group of an active task bears in its name; of any other it is its own id."""
        name, _, _ = self.group_id.rpartition("#")
        return name.removeprefix(TASK) if name.startswith(TASK) else self.group_id

    @property
    def is_sample(self) -> bool:
        """Whether it is an answer of an earlier group, trained once more."""
        return self.advantage is not None

    @property
    def num_tokens(self) -> int:
        """That are held for it."""
        return total_tokens(self.episodes)

    @property
    def version(self) -> int:
        """Of the oldest weights that had a part in it."""
        return min((call.version for one in self.episodes for call in one.calls), default=0)

    @property
    def is_partial(self) -> bool:
        """Whether some of its episodes have no reward."""
        return len(self.rewards) < len(self.episodes)

    @property
    def scored(self) -> list[ScoredEpisode]:
        return [episode for episode in self.episodes if episode.reward is not None]

    @property
    def rewards(self) -> list[float]:
        """Of those."""
        return [episode.reward for episode in self.episodes if episode.reward is not None]


def total_tokens(episodes: Sequence[ScoredEpisode]) -> int:
    """That are held for them."""
    return sum(call.num_tokens for episode in episodes for call in episode.calls)
