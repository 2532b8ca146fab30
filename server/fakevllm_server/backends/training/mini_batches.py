"""Divide the batch of a training step into mini-batches. Each mini-batch has an update of its own.

A mini-batch consists of whole groups, so the siblings of a group stay together, and so do all calls
that a loss treats as one sequence. A mini-batch is a batch: its calls get the weights in the loss
that they would have in a step with only these groups. Advantages were computed from the whole step
before, and do not change.

The numbers of groups of two mini-batches differ by at most one. Among such divisions, this module
chooses one whose mini-batches have similar numbers of trained tokens. Groups arrive in the order in
which they end, so a division in this order would collect the short answers in one mini-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fakevllm_server.types.backend import Batch


@dataclass(frozen=True, slots=True)
class MiniBatch:
    batch: Batch
    """The calls and demonstrations of the mini-batch, in the order of the step."""
    share: float
    """Share of the step's tokens that are in the mini-batch. Each token has the weight that it has
    in the policy loss. The shares of a step's mini-batches sum to 1."""


def mini_batches(batch: Batch, num_wanted: int) -> list[MiniBatch]:
    """Divide a step's batch into `num_wanted` mini-batches, or into one for each group if there are
    fewer groups with trained tokens. A step has at least one mini-batch, which may be empty."""
    sizes = _tokens_of_groups(batch)
    number = min(num_wanted, sum(size > 0 for size in sizes.values()))
    if number <= 1:
        return [MiniBatch(batch, 1.0)]
    place = assign_groups(sizes, number)
    batches = [
        replace(
            batch,
            calls=[call for call in batch.calls if place[call.group_id] == at],
            demonstrations=[one for one in batch.demonstrations if place[one.group_id] == at],
        )
        for at in range(number)
    ]
    shares = _shares([_loss_weight(one) for one in batches])
    return [MiniBatch(one, share) for one, share in zip(batches, shares, strict=True)]


def assign_groups(sizes: Mapping[str, int], num_parts: int) -> dict[str, int]:
    """Return the number of the part of each group. `sizes` has the number of tokens of each group.

    The groups are dealt out in rounds, the largest groups first. In each round, each part gets one
    group, and the part with the fewest tokens gets the largest group of the round. The last round
    may have fewer groups than there are parts.

    >>> assign_groups({"a": 1, "b": 5, "c": 4, "d": 2}, 2)
    {'b': 0, 'c': 1, 'd': 1, 'a': 0}
    """
    order = sorted(sizes, key=lambda group: sizes[group], reverse=True)
    totals = [0] * num_parts
    place: dict[str, int] = {}
    for start in range(0, len(order), num_parts):
        by_tokens = sorted(range(num_parts), key=lambda at: totals[at])
        for group, at in zip(order[start : start + num_parts], by_tokens, strict=False):
            place[group] = at
            totals[at] += sizes[group]
    return place


def _tokens_of_groups(batch: Batch) -> dict[str, int]:
    """Return the number of trained tokens of each group of the batch."""
    sizes: defaultdict[str, int] = defaultdict(int)
    for call in batch.calls:
        sizes[call.group_id] += call.num_trained if call.weight > 0 else 0
    for one in batch.demonstrations:
        sizes[one.group_id] += len(one.response_ids)
    return dict(sizes)


def _loss_weight(batch: Batch) -> float:
    """Return the sum of the weights of all tokens in the policy loss."""
    return sum(call.weight * call.num_trained for call in batch.calls if call.weight > 0)


def _shares(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total if total else 1 / len(weights) for weight in weights]
