"""Advantage estimators that normalize over all trained tokens of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from fakevllm_server.algorithms.advantage_input import (
    AdvantageSpec,
    Outcome,
    by_group,
    centred,
    per_token,
)
from fakevllm_server.types.number_arrays import FloatArray, float_array, repeated


def reinforce_plus_plus(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[FloatArray]:
    """Compute the REINFORCE++ advantage: the discounted return of each token, normalized over all
    trained tokens of the step.

    The return of token t is G_t = Σ_{s ≥ t} γ^(s − t) · r_s. The sum runs over the trained tokens
    of the episode, across all of its calls. γ is `spec.gamma`. The reward r_s of token s is the
    negative of the token's penalty. For the last token, the episode's reward is added. The function
    `whiten` normalizes the returns over the step. Therefore an episode is compared with the whole
    step, not with its group. The result has one list per episode, with one advantage per trained
    token.

    Source: Hu et al., arXiv 2501.03262. The paper adds a KL penalty to the reward of each token.
    """
    return whiten([outcome.returns(spec.gamma) for outcome in outcomes], spec.std_floor)


def reinforce_plus_plus_baseline(
    outcomes: Sequence[Outcome], spec: AdvantageSpec
) -> list[FloatArray]:
    """Compute the advantage of REINFORCE++ with a baseline: A = r − group mean, normalized over all
    trained tokens of the step.

    r is the episode's reward minus its token penalties, and the group mean is the mean of r over
    the episode's group. The result has one list per episode, with one advantage per trained token.
    Source: Hu et al., arXiv 2501.03262.

    The normalization subtracts the mean of A over all trained tokens of the step. This mean is
    usually not 0, because long episodes have more tokens than short ones. Therefore the normalized
    advantages in a group with equal rewards are usually not 0 either.

    An episode that is alone in its group gets advantage 0, and is left out of the normalization.
    verl uses the raw reward of such an episode instead.
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
        next(whitened) if sizes[outcome.group_id] > 1 else repeated(0.0, outcome.num_tokens)
        for outcome in outcomes
    ]


def whiten(rows: Sequence[Sequence[float]], floor: float) -> list[FloatArray]:
    """Normalize all values: (x − mean) / max(std, floor). mean and std are the mean and the sample
    standard deviation (ddof 1) over all values of all rows.

    If all values are equal, the results are exactly 0. verl divides by sqrt(variance + 1e-8)
    instead.

    >>> whiten([[1.0, 1.0], [4.0]], 0.05)
    [[-0.5773502691896258, -0.5773502691896258], [1.1547005383792517]]
    """
    num_values = sum(map(len, rows))
    rows_with_values = [row for row in rows if row]
    lowest = min((min(row) for row in rows_with_values), default=0.0)
    highest = max((max(row) for row in rows_with_values), default=0.0)
    if lowest == highest:
        return [repeated(0.0, len(row)) for row in rows]
    # From generators: one call of `fsum` on a list of all values would hold the interpreter's lock.
    mean = math.fsum(value for row in rows for value in row) / num_values
    squares = math.fsum((value - mean) ** 2 for row in rows for value in row)
    variance = squares / (num_values - 1)
    divisor = max(math.sqrt(variance), floor)
    return [float_array([(value - mean) / divisor for value in row]) for row in rows]
