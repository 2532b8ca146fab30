"""Data types for captured LLM calls, and for the episodes and groups that are trained on."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import cast

import orjson

from fakevllm_adapters.protocol.packed_numbers import (
    id_bytes,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from fakevllm_adapters.protocol.swarm import CapturedCall
from fakevllm_server.types.number_arrays import IdArray, float_array, id_array
from fakevllm_server.types.token_masks import TokenMasks

MAX_ID = 2**31 - 1
"""Largest token id and weight version. Both are sent to the trainer as 32-bit integers."""

LOGGED_VERSION = MAX_ID
"""Weight version of the tokens of logged groups, which were sampled in an earlier run. The versions
of another run cannot be compared with those of this run. This version is above all of them, so that
no logged call counts as stale, as rejected, or as sampled by the current weights."""
NO_TOKEN_SETS = "no_token_sets: the sets of allowed tokens are not in the ledger"
"""Reason why a logged call is not trained whose tokens were sampled from restricted sets."""


def are_ids(values: Sequence[object]) -> bool:
    """Return True if all values are integers from 0 to MAX_ID, and none is a boolean.

    >>> are_ids([0, MAX_ID]), are_ids([MAX_ID + 1]), are_ids([True]), are_ids([])
    (True, False, False, True)
    """
    if not set(map(type, values)) <= {int}:
        return False
    ids = cast(Sequence[int], values)
    return not ids or (min(ids) >= 0 and max(ids) <= MAX_ID)


def checked_ids(values: Sequence[object]) -> IdArray:
    """Return the ids in `values`, which was parsed from JSON, as an array. Raises ValueError if a
    value is not an id (see `are_ids`).

    For long prompts, this function is several times as fast as `are_ids`, because it checks the
    numbers as text.

    >>> checked_ids([0, MAX_ID])
    [0, 2147483647]
    """
    try:
        text = orjson.dumps(values)
        # The text of numbers from 0 on has only digits, and commas between them.
        if text.translate(None, b"0123456789,") == b"[]":
            return id_array(cast(Sequence[int], values))
    except (TypeError, OverflowError):
        pass
    raise ValueError(f"not ids: {values!r:.100}")


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """A range [start, end) of response tokens, and the weight version that sampled these tokens.

    If two spans overlap, either version may have sampled a token in the overlap.
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One LLM call. It has the tokens and their log-probabilities, as the engine reported them."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float] | None
    versions: Sequence[VersionSpan]
    temperature: float
    finish_reason: str | None
    untrainable: str | None
    """Reason why the call must not be trained on, or None if the call may be trained on."""
    allowed: TokenMasks | None = None
    """For each response token, the set of tokens from which it was sampled. None means the whole
    vocabulary. The server sends the sets to the trainer, but not to the proxy, because the proxy
    does not need them, and they may be larger than the call."""
    replica: str | None = None
    """Name of the rollout replica that sampled the call. None if the server had only one rollout
    engine."""

    def __post_init__(self) -> None:
        """Convert ids and log-probabilities to arrays. Lists would be slow for the millions of
        tokens that may wait for a step."""
        object.__setattr__(self, "prompt_ids", id_array(self.prompt_ids))
        object.__setattr__(self, "response_ids", id_array(self.response_ids))
        if self.logprobs is not None:
            object.__setattr__(self, "logprobs", float_array(self.logprobs))

    @property
    def num_trained(self) -> int:
        """Number of response tokens that are trained. Forced tokens are not counted. A token is
        forced if no other token was allowed at its position."""
        return len(self.response_ids) - (self.allowed.num_forced if self.allowed else 0)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def version(self) -> int:
        """Oldest weight version that sampled a token of the response."""
        return min((span.version for span in self.versions), default=0)

    def to_wire(self, prompt: int | None = None) -> CapturedCall:
        """Return the call in the form that is sent to the proxy. This form has no sets of allowed
        tokens.

        `prompt` is the index of the call's prompt among prompts that are sent separately. It is
        None if the prompt is sent with the call.
        """
        return CapturedCall(
            prompt_ids=pack_ids(self.prompt_ids) if prompt is None else "",
            prompt=prompt,
            response_ids=pack_ids(self.response_ids),
            logprobs=None if self.logprobs is None else pack_floats(self.logprobs),
            weight_versions=[[span.version, span.start, span.end] for span in self.versions],
            temperature=self.temperature,
            finish_reason=self.finish_reason,
            untrainable=self.untrainable,
            shaped=self.allowed is not None,
            replica=self.replica,
        )

    @staticmethod
    def from_wire(call: CapturedCall) -> RecordedCall:
        """Return the call from the form that `to_wire` returns.

        Raises ValueError if the fields of the call contradict each other. Also raises ValueError if
        tokens were sampled from restricted sets (`shaped`), because `to_wire` leaves these sets
        out.
        """
        if call.shaped:
            raise ValueError("its sets of allowed tokens were not kept, so it cannot be trained")
        response_ids = unpack_ids(call.response_ids)
        logprobs = None if call.logprobs is None else unpack_floats(call.logprobs)
        spans = [VersionSpan(*span) for span in call.weight_versions if len(span) == 3]
        prompt_ids = unpack_ids(call.prompt_ids)
        fits = logprobs is None or len(logprobs) == len(response_ids)
        fits = fits and len(spans) == len(call.weight_versions) > 0
        fits = fits and all(0 <= span.start <= span.end <= len(response_ids) for span in spans)
        fits = fits and all(0 <= span.version <= MAX_ID for span in spans)
        fits = fits and bool(prompt_ids) and min(prompt_ids + response_ids) >= 0
        if not fits or (call.untrainable is None and call.temperature <= 0):
            raise ValueError("its ids, log-probabilities and weight versions do not fit together")
        if not all(map(math.isfinite, [call.temperature, *(logprobs or ())])):
            raise ValueError("its temperature or a log-probability is not a finite number")
        return RecordedCall(
            prompt_ids,
            response_ids,
            logprobs,
            spans,
            call.temperature,
            call.finish_reason,
            call.untrainable,
            replica=call.replica,
        )

    @staticmethod
    def from_log(call: CapturedCall) -> RecordedCall:
        """Return a call of an earlier run from its fields in a ledger. The call gets the version
        LOGGED_VERSION and no replica. If its tokens were sampled from restricted sets, it is not
        trainable, because a ledger does not have the sets.

        Raises ValueError if the fields of the call contradict each other.
        """
        if call.shaped:
            untrainable = call.untrainable or NO_TOKEN_SETS
            call = call.model_copy(update={"shaped": False, "untrainable": untrainable})
        recorded = RecordedCall.from_wire(call)
        span = VersionSpan(LOGGED_VERSION, 0, len(recorded.response_ids))
        return replace(recorded, versions=[span], replica=None)


def with_prompts_apart(
    calls: Sequence[Sequence[RecordedCall]],
) -> tuple[list[list[CapturedCall]], list[bytes]]:
    """Return two lists: the calls in the form that is sent to the proxy, and the prompts of the
    calls. A call refers to its prompt by an index into the second list, so that calls with equal
    prompts can share one entry."""
    indices: dict[int, int] = {}
    prompts: list[Sequence[int]] = []

    def index_of(ids: Sequence[int]) -> int:
        if id(ids) not in indices:
            if not prompts or prompts[-1] != ids:
                prompts.append(ids)
            indices[id(ids)] = len(prompts) - 1
        return indices[id(ids)]

    wire = [[call.to_wire(index_of(call.prompt_ids)) for call in own] for own in calls]
    return wire, [id_bytes(ids) for ids in prompts]


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """One sample of a group, with its captured calls and its reward. A sample is a claimed episode
    or one answer to an app's request. Both are called an episode here."""

    index: int
    """Index of the episode, unique within its group."""
    reward: float | None
    """Reward of the episode, or None if it was not scored."""
    calls: Sequence[RecordedCall]
    owner: str = ""
    """Id of the sibling or of the claimed episode that made the calls."""

    @property
    def trains(self) -> bool:
        """Whether the episode has a reward and at least one call that may be trained on."""
        return self.reward is not None and any(call.untrainable is None for call in self.calls)

    @property
    def is_greedy(self) -> bool:
        """Whether all calls of the episode were sampled greedily, at temperature 0."""
        return {call.temperature for call in self.calls} == {0.0}


TASK = "task:"
"""Prefix of the ids of groups that consist of claimed episodes. In such an id, the id of the
group's task follows the prefix."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A group whose episodes have ended. In training, the rewards of these episodes are compared
    with each other."""

    group_id: str
    episodes: Sequence[ScoredEpisode]
    follows: RecordedCall | None = None
    """The call of the previous turn of the same conversation whose answer the app received. None if
    there is no such call, or if the server no longer has it."""
    advantage: float | None = None
    """The advantage that the proxy has sent with a feedback sample; None for all other groups. A
    feedback sample has one episode, which is not compared with others."""
    hook_hash: str = ""
    """Digest of the hook files that gave the rewards; empty if it is unknown."""
    demonstrates: str | None = None
    """The demonstration loss that trains the group, if the group was made from a user's edit of an
    answer; None for all other groups. Its episodes have no rewards, and no log-probabilities: see
    edit_demonstrations.py."""

    @property
    def task_id(self) -> str:
        """Id of the task on which the group's episodes worked. If the group does not consist of
        claimed episodes, this is the group's own id."""
        name, _, _ = self.group_id.rpartition("#")
        return name.removeprefix(TASK) if name.startswith(TASK) else self.group_id

    @property
    def is_sample(self) -> bool:
        """True if the group was made from a user's feedback on an earlier answer. Such a group is
        either a feedback sample (the answer is trained once more), or was made from the user's edit
        of the answer."""
        return self.advantage is not None or self.demonstrates is not None

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the prompts and responses of all calls."""
        return total_tokens(self.episodes)

    @property
    def version(self) -> int:
        """Oldest weight version that sampled a token of the group."""
        return min((call.version for episode in self.episodes for call in episode.calls), default=0)

    def is_sampled_by(self, versions: Collection[int]) -> bool:
        """Return True if one of these versions sampled a token of the group."""
        return bool(versions) and any(
            span.version in versions
            for episode in self.episodes
            for call in episode.calls
            for span in call.versions
        )

    @property
    def is_partial(self) -> bool:
        """Whether at least one episode of the group has no reward. False for the group of a
        user's edit, because its demonstrations need no rewards."""
        return self.demonstrates is None and len(self.rewards) < len(self.episodes)

    @property
    def scored(self) -> list[ScoredEpisode]:
        """The episodes of the group that have a reward."""
        return [episode for episode in self.episodes if episode.reward is not None]

    @property
    def rewards(self) -> list[float]:
        """The rewards of the episodes that have a reward, in the order of the episodes."""
        return [episode.reward for episode in self.episodes if episode.reward is not None]


def total_tokens(episodes: Sequence[ScoredEpisode]) -> int:
    """Return the number of tokens in all prompts and responses of the episodes."""
    return sum(call.num_tokens for episode in episodes for call in episode.calls)
