"""The input of the advantage estimators, and the arithmetic that they share."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fakevllm_server.types.number_arrays import FloatArray, float_array, repeated


@dataclass(frozen=True, slots=True)
class Outcome:
    """One episode with its final reward, as the advantage estimators read it. An episode is a run
    of an agent on a task."""

    group_id: str
    """Id of the episode's group. Episodes of one group are compared with each other."""
    reward: float
    num_tokens: int
    """Number of trained tokens. If this is 0, the episode is not trained, but most estimators still
    use its reward in the baseline of the group's other episodes."""
    penalties: Sequence[float] = ()
    """Penalty of each trained token, such as a KL penalty. Penalties are subtracted from the
    reward. An empty sequence means no penalties."""
    is_greedy: bool = False
    """Whether the episode was sampled at temperature 0."""

    def __post_init__(self) -> None:
        assert len(self.penalties) in (0, self.num_tokens), "a penalty for each token, or none"

    @property
    def score(self) -> float:
        """The episode's score: its reward minus the sum of its token penalties."""
        return self.reward - math.fsum(self.penalties)

    def returns(self, gamma: float) -> FloatArray:
        """Return the discounted return of each trained token of the episode.

        The return of token t is Σ_{s ≥ t} gamma^(s − t) · r_s, where r_s is the reward of token s.
        The reward of a token is its penalty with the opposite sign. The reward of the last token
        also includes the episode's reward.
        """
        returns = [0.0] * self.num_tokens
        value = self.reward
        for position in reversed(range(self.num_tokens)):
            value -= self.penalties[position] if self.penalties else 0.0
            returns[position] = value
            value *= gamma
        return float_array(returns)


@dataclass(frozen=True, slots=True)
class AdvantageSpec:
    """Settings of the advantage estimators. Settings that also exist in verl have verl's names."""

    norm_adv_by_std_in_grpo: bool = True
    """Whether GRPO divides by the standard deviation. If false, the advantage is that of Dr.
    GRPO."""
    std_floor: float = 0.05
    """Lower bound of the divisor in estimators that divide by a standard deviation. If a judge
    gives nearly equal rewards, the lower bound keeps the noise in these rewards from being
    amplified. verl adds 1e-6 to the standard deviation instead."""
    gamma: float = 1.0
    """Discount factor per token."""


def by_group(
    outcomes: Sequence[Outcome], of_group: Callable[[list[Outcome]], Sequence[float]]
) -> list[float]:
    """Compute one number for each episode by calling `of_group` once for each group. `of_group`
    gets the outcomes of the group's episodes, and returns one number for each episode.

    Return the numbers of all groups in the order of `outcomes`.
    """
    positions: defaultdict[str, list[int]] = defaultdict(list)
    for position, outcome in enumerate(outcomes):
        positions[outcome.group_id].append(position)
    numbers = [0.0] * len(outcomes)
    for in_group in positions.values():
        results = of_group([outcomes[position] for position in in_group])
        for position, number in zip(in_group, results, strict=True):
            numbers[position] = number
    return numbers


def per_token(outcomes: Sequence[Outcome], numbers: Sequence[float]) -> list[FloatArray]:
    """Return one array for each episode. `numbers` has one number for each episode. The episode's
    array contains this number once for each trained token of the episode."""
    return [
        repeated(number, outcome.num_tokens)
        for outcome, number in zip(outcomes, numbers, strict=True)
    ]


def centred(scores: Sequence[float]) -> list[float]:
    """Return each score minus the mean of the scores.

    If all scores are equal, the results are exactly 0. Without this special case, the results could
    be rounding errors, which become large when they are divided by a small standard deviation.
    """
    if not scores or min(scores) == max(scores):
        return [0.0] * len(scores)
    mean = statistics.fmean(scores)
    return [score - mean for score in scores]


def over_std(numbers: Sequence[float], scores: Sequence[float], floor: float) -> list[float]:
    """Divide each of `numbers` by the sample standard deviation of `scores` (with ddof 1). If the
    standard deviation is smaller than `floor`, divide by `floor` instead. With fewer than two
    scores, return the numbers unchanged."""
    if len(scores) < 2:
        return list(numbers)
    divisor = max(statistics.stdev(scores), floor)
    return [number / divisor for number in numbers]
