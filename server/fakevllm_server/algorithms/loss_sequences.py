"""Group calls into units, and compute the weight of each call in the loss. The loss treats each
unit as one sequence.

A call is one model call of an episode: a prompt with the sampled response. The setting `loss_unit`
of a job chooses the units:

    call      each call is a unit, like a row of a batch in verl or TRL
    timeline  a unit is a chain of calls of an episode, in which each prompt begins with all tokens
              (prompt and response) of the previous call
    episode   all calls of an episode are one unit, with the total weight of one call

The weights are computed from the whole step before calls are packed into micro-batches. Therefore
the loss does not depend on how the micro-batches are formed. If several calls share a token, the
forward pass may compute this token only once. In the loss, the token still counts once for each of
these calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fakevllm_adapters.job.loss_spec import LossSpec


class TokenizedCall(Protocol):
    """A model call with the token ids of its prompt and of its response."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def response_ids(self) -> Sequence[int]: ...


def unit_labels(calls: Sequence[TokenizedCall], loss_unit: str) -> list[int]:
    """Return the number of each call's unit (one sequence in the loss). `calls` are the calls of
    one episode in the order in which they were made.

    Units are numbered from 0. If `loss_unit` is `call`, each call is a unit. If `loss_unit` is
    `episode`, all calls are one unit. If `loss_unit` is `timeline`, a call joins a unit if its
    prompt begins with all tokens (prompt and response) of the unit's latest call. If several units
    qualify, the call joins the unit whose latest call is longest. If two calls continue the same
    call, the first of them joins the unit, and the second begins a new unit.
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
    """Return the weight that each token of a call has in the loss. `num_calls` is the number of
    trained calls in the call's episode. If `loss_unit` is `episode`, the weight is 1 / `num_calls`.
    An episode of many calls then counts as much as one of a single call, if the calls are equally
    long. For any other `loss_unit`, the weight is 1."""
    return 1 / max(num_calls, 1) if loss_unit == "episode" else 1.0


class LossCall(NamedTuple):
    """The properties of one model call from which its weight in the loss is computed."""

    unit: Hashable
    """Key of the call's unit, which is its sequence in the loss."""
    weight: float
    """Weight of each token of the call; 0 if the call is not in the loss."""
    num_tokens: int
    """Number of trained tokens of the call."""


@dataclass(frozen=True, slots=True)
class CallShare:
    """The unit of a call, and the factors by which the call's tokens count in the loss and in the
    metrics of the step. A unit is one sequence in the loss."""

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
    """Return the unit and the weights of each call of one step, in the order of `calls`.

    A token's loss is multiplied by a scale, which depends on the setting `loss_agg_mode`:

        token-mean               w / Σ_step w
        token-sum                w
        seq-mean-token-sum       w / U
        seq-mean-token-mean      w / U / Σ_unit w
        seq-mean-token-sum-norm  w / U / loss_scale_factor

    w is the token's weight, taken from the field `weight` of its call. Σ_step w is the sum of w
    over all tokens of the step. Σ_unit w is the sum over the tokens of the token's unit (its
    sequence in the loss). U is the number of units in the step that have a token with w > 0. If
    `loss_scale_factor` is not set, the number of tokens of the longest unit is used instead.

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
    """Sums over the tokens of a step that count in the loss (the tokens with a weight above 0)."""

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
        """Return the number by which the weight of each token in `unit` (one sequence in the loss)
        is divided. The number depends on the aggregation mode `spec.loss_agg_mode`. For
        `token-mean`, for example, the number is the sum of all weights of the step."""
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
    """Return the weight of each token of the call, divided by `divisor`. Return 0 if the call has
    no tokens in the loss."""
    counts = call.weight > 0 and call.num_tokens > 0
    return call.weight / divisor if counts else 0.0
