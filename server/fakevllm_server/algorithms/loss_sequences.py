"""Grouping of calls into units, and the weights of calls in the loss. The loss treats each unit as
one sequence.

A job chooses one of three units (`loss_unit`):

    call      each call is a unit, like a row of a batch in verl or TRL
    timeline  calls of an episode are one unit if each prompt continues the call before it
    episode   all calls of an episode are one unit; together they weigh as much as one call

The weights are computed from the whole step before calls are packed into micro-batches. Therefore
the loss does not depend on how the micro-batches are formed. If several calls begin with the same
tokens, each shared token counts once for each of these calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fakevllm_adapters.job.loss_spec import LossSpec


class TokenizedCall(Protocol):
    """A call with the token ids of its prompt and its response."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def response_ids(self) -> Sequence[int]: ...


def unit_labels(calls: Sequence[TokenizedCall], loss_unit: str) -> list[int]:
    """Return the unit number of each call. `calls` are the calls of one episode in order.

    Units are numbered from 0. If `loss_unit` is `timeline`, a call continues a timeline if the
    call's prompt begins with all tokens of the timeline so far. If several timelines match, the
    call continues the longest. If two calls continue the same call, the first of them joins its
    timeline and the second starts a new timeline, so that no token is counted twice.
    """
    if loss_unit == "call":
        return list(range(len(calls)))
    if loss_unit == "episode":
        return [0] * len(calls)
    ends: list[list[int]] = []
    labels: list[int] = []
    for call in calls:
        prompt = list(call.prompt_ids)
        matching = [
            label
            for label, end in enumerate(ends)
            if len(end) <= len(prompt) and prompt[: len(end)] == end
        ]
        label = max(matching, key=lambda label: len(ends[label]), default=len(ends))
        ends[label : label + 1] = [[*prompt, *call.response_ids]]
        labels.append(label)
    return labels


def token_weight(loss_unit: str, num_calls: int) -> float:
    """Return the weight that each token of a call has in the loss. If `loss_unit` is `episode`, the
    weight is 1 / `num_calls`, so that an episode weighs as much as one call. Otherwise the weight
    is 1. `num_calls` is the number of trained calls in the call's episode."""
    return 1 / max(num_calls, 1) if loss_unit == "episode" else 1.0


class LossCall(NamedTuple):
    """The properties of a call that determine the denominators of the loss."""

    unit: Hashable
    """Identity of the call's unit."""
    weight: float
    """Weight of each token of the call; 0 if the call is not in the loss."""
    num_tokens: int
    """Number of trained tokens."""


@dataclass(frozen=True, slots=True)
class CallShare:
    """The unit of one call, and the weights that its tokens have in the step's loss and in the
    step's metrics."""

    unit: int
    """Number of the call's unit within the step."""
    unit_tokens: int
    """Number of trained tokens in the whole unit. A micro-batch contains the whole unit if its
    calls of this unit have this many trained tokens in total."""
    scale: float
    """Factor for the loss of each token. The scaled losses of all tokens sum to the step's loss."""
    token_share: float
    """Weight of each token in metrics that are means over tokens. The weights of all tokens of a
    step sum to 1."""


def call_shares(calls: Sequence[LossCall], spec: LossSpec) -> list[CallShare]:
    """Return the weights of all calls of one step, in the order of `calls`.

    The loss of each token is multiplied by a scale, which depends on `loss_agg_mode`:

        token-mean               w / Σ_step w
        token-sum                w
        seq-mean-token-sum       w / U
        seq-mean-token-mean      w / U / Σ_unit w
        seq-mean-token-sum-norm  w / U / loss_scale_factor

    w is the token's weight. Σ_step and Σ_unit sum the weights of all tokens in the step and in the
    token's unit. U is the number of units that have a token with a weight above 0. Without
    `loss_scale_factor`, the number of tokens of the longest unit is used.

    >>> shares = call_shares([LossCall("a", 1.0, 3), LossCall("b", 1.0, 1)], LossSpec())
    >>> [share.scale for share in shares]
    [0.25, 0.25]
    """
    totals = _Totals.from_calls(calls)
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
    """Sums over the tokens of a step that are in the loss."""

    weights: dict[Hashable, float]
    """Sum of the tokens' weights by unit."""
    lengths: dict[Hashable, int]
    """Number of tokens by unit."""
    weight: float
    """Sum of all tokens' weights."""
    num_units: int
    """Number of units with a token in the loss."""
    longest: int
    """Number of tokens of the longest unit."""

    @staticmethod
    def from_calls(calls: Sequence[LossCall]) -> _Totals:
        """Return the totals of the tokens of all calls of a step."""
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
        """Return the number by which the weights of the tokens in `unit` are divided. The docstring
        of `call_shares` lists these numbers for all modes."""
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
    """Return the factor by which the loss of a call's tokens is multiplied. It is the call's weight
    divided by `divisor`, or 0 if the call has no tokens in the loss."""
    counts = call.weight > 0 and call.num_tokens > 0
    return call.weight / divisor if counts else 0.0
