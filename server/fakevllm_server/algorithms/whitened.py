"""Advantage estimators that normalize over all tokens of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from fakevllm_server.algorithms.advantage_input import (
    AdvantageSpec,
    Outcome,
    by_group,
    centred,
    per_token,
)


def reinforce_plus_plus(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[list[float]]:
    """Compute REINFORCE++: G_t = Σ_{s ≥ t} γ^(s − t) · r_s, whitened over all trained tokens.

    G_t is the return of token t, r_s is the reward of token s, and γ is the discount factor. t and
    s number the trained tokens of the whole episode, call after call. The advantage of a token is
    its whitened return: the returns of all trained tokens of the step are normalized together. An
    episode is therefore compared with the whole step, not with its group.

    Source: Hu et al., arXiv 2501.03262. The paper uses a KL penalty in the reward.
    """
    return whiten([outcome.returns(spec.gamma) for outcome in outcomes], spec.std_floor)


def reinforce_plus_plus_baseline(
    outcomes: Sequence[Outcome], spec: AdvantageSpec
) -> list[list[float]]:
    """Compute REINFORCE++ with a baseline: A = r − group mean, whitened over all trained tokens.

    A is the advantage and r is the reward of the episode. Source: Hu et al., arXiv 2501.03262.

    Whitening subtracts the mean of A over all trained tokens of the step. This mean is not 0 in
    general, because a long episode has more tokens than a short one. Therefore the advantages in a
    group with equal rewards are not 0.

    If a group has only one episode, this episode is not whitened and gets advantage 0. verl uses
    the raw reward of such an episode instead.
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
    """Return all values normalized: (x − mean) / max(std, floor), with ddof 1 for the standard
    deviation.

    Mean and standard deviation are taken over all values of all rows. If all values are equal, the
    results are exactly 0. verl divides by sqrt(variance + 1e-8) instead.

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
