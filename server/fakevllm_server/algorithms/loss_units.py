"""What counts as one sequence in a loss, and each call's share of a step's loss.

    call      every call by itself, as rows of verl or TRL
    timeline  calls of an episode of which each goes on where the one before ended: one path
    episode   all calls of an episode; they share its vote, however many they are

All shares are of the whole step and computed here, before anything is packed: the sum over
micro-batches is then the same however they are cut. Tokens are counted call by call, not by nodes
of a trie.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fakevllm_adapters.job.loss_spec import LossSpec


class TokenizedCall(Protocol):
    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def response_ids(self) -> Sequence[int]: ...


def unit_labels(calls: Sequence[TokenizedCall], loss_unit: str) -> list[int]:
    """For the calls of one episode, in order: which of its units each belongs to, from 0.

    A call goes on with the timeline whose end its prompt begins with, the longest such; two calls
    that go on from one are the same timeline and a new one, so that nothing counts twice.
    """
    if loss_unit == "call":
        return list(range(len(calls)))
    if loss_unit == "episode":
        return [0] * len(calls)
    ends: list[list[int]] = []
    labels: list[int] = []
    for call in calls:
        prompt = list(call.prompt_ids)
        fitting = [
            label
            for label, end in enumerate(ends)
            if len(end) <= len(prompt) and prompt[: len(end)] == end
        ]
        label = max(fitting, key=lambda label: len(ends[label]), default=len(ends))
        ends[label : label + 1] = [[*prompt, *call.response_ids]]
        labels.append(label)
    return labels


def token_weight(loss_unit: str, num_calls: int) -> float:
    """Of each token of a call, in an episode of which `num_calls` are trained."""
    return 1 / max(num_calls, 1) if loss_unit == "episode" else 1.0


class LossCall(NamedTuple):
    """A call of a step, as far as denominators go."""

    unit: Hashable
    """Calls of the same unit have the same."""
    weight: float
    """Of each of its tokens; 0 where it is not in the loss."""
    num_tokens: int
    """Trained ones."""


@dataclass(frozen=True, slots=True)
class CallShare:
    """What one call is of its step."""

    unit: int
    unit_tokens: int
    """Of its whole unit, to see whether that is all there."""
    scale: float
    """What the loss of each of its tokens is multiplied by; the sum over all is the step's."""
    token_share: float
    """Each token's part in a mean over tokens, for what is shown; over a step they sum to 1."""


def call_shares(calls: Sequence[LossCall], spec: LossSpec) -> list[CallShare]:
    """Of all calls of one step, in their order.

        token-mean               w / Σ_step w
        token-sum                w
        seq-mean-token-sum       w / units
        seq-mean-token-mean      w / units / Σ_unit w
        seq-mean-token-sum-norm  w / units / loss_scale_factor

    with w the token's weight and `units` those that have a counted token.

    >>> shares = call_shares([LossCall("a", 1.0, 3), LossCall("b", 1.0, 1)], LossSpec())
    >>> [share.scale for share in shares]
    [0.25, 0.25]
    """
    totals = _Totals.of(calls)
    numbers = {unit: number for number, unit in enumerate(totals.lengths)}
    return [
        CallShare(
            unit=numbers[call.unit],
            unit_tokens=totals.lengths[call.unit],
            scale=_share(call, totals.divisor(call.unit, spec)),
            token_share=_share(call, totals.weight),
        )
        for call in calls
    ]


class _Totals(NamedTuple):
    """Of all tokens of a step that are in the loss."""

    weights: dict[Hashable, float]
    """By unit."""
    lengths: dict[Hashable, int]
    weight: float
    num_units: int
    longest: int

    @staticmethod
    def of(calls: Sequence[LossCall]) -> _Totals:
        weights: defaultdict[Hashable, float] = defaultdict(float)
        lengths: defaultdict[Hashable, int] = defaultdict(int)
        for call in calls:
            is_counted = call.weight > 0
            weights[call.unit] += call.weight * call.num_tokens if is_counted else 0.0
            lengths[call.unit] += call.num_tokens if is_counted else 0
        num_units = sum(weight > 0 for weight in weights.values())
        longest = max(lengths.values(), default=0)
        return _Totals(weights, lengths, sum(weights.values()), num_units, longest)

    def divisor(self, unit: Hashable, spec: LossSpec) -> float:
        match spec.loss_agg_mode:
            case "token-mean":
                return self.weight
            case "token-sum":
                return 1.0
            case "seq-mean-token-sum":
                return self.num_units
            case "seq-mean-token-mean":
                return self.num_units * self.weights[unit]
            case _:
                return self.num_units * (spec.loss_scale_factor or self.longest)


def _share(call: LossCall, divisor: float) -> float:
    counts = call.weight > 0 and call.num_tokens > 0
    return call.weight / divisor if counts else 0.0
