"""Advantages scaled over all tokens of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from fakevllm_server.algorithms.outcome import (
    AdvantageSpec,
    Outcome,
    by_group,
    centred,
    per_token,
)


def reinforce_plus_plus(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[list[float]]:
    """G_t = Σ_{s ≥ t} γ^(s − t) · r_s, whitened over all trained tokens of the step.

    Hu et al., arXiv 2501.03262. It compares with the whole step, not with the group; its KL is
    meant to be in the reward. γ counts tokens of the whole episode, call after call.
    """
    return whiten([outcome.returns(spec.gamma) for outcome in outcomes], spec.std_floor)


def reinforce_plus_plus_baseline(
    outcomes: Sequence[Outcome], spec: AdvantageSpec
) -> list[list[float]]:
    """A = r − mean of the group, then whitened over all trained tokens of the step.

    arXiv 2501.03262. Long episodes weigh more in the whitening, so a tied group's advantage is not
    0 but minus the step's mean. A lone episode is left out and gets 0; verl's keeps its raw reward.
    """
    sizes = Counter(outcome.group_id for outcome in outcomes)
    numbers = by_group(outcomes, lambda group: centred([outcome.score for outcome in group]))
    compared = [outcome for outcome in outcomes if sizes[outcome.group_id] > 1]
    kept = [
        number
        for outcome, number in zip(outcomes, numbers, strict=True)
        if sizes[outcome.group_id] > 1
    ]
    whitened = iter(whiten(per_token(compared, kept), spec.std_floor))
    return [
        next(whitened) if sizes[outcome.group_id] > 1 else [0.0] * outcome.num_tokens
        for outcome in outcomes
    ]


def whiten(rows: Sequence[Sequence[float]], floor: float) -> list[list[float]]:
    """(x − mean) / max(std, floor), both over all values of all rows, std with ddof 1.

    verl divides by sqrt(variance + 1e-8) instead. Equal values give exact zeros.

    >>> whiten([[1.0, 1.0], [4.0]], 0.05)
    [[-0.5773502691896258, -0.5773502691896258], [1.1547005383792517]]
    """
    values = list(chain.from_iterable(rows))
    if not values or min(values) == max(values):
        return [[0.0] * len(row) for row in rows]
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    divisor = max(math.sqrt(variance), floor)
    return [[(value - mean) / divisor for value in row] for row in rows]
