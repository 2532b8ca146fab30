"""The input of advantage estimators, and the arithmetic that they share."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """One episode with its final reward, as the input of an advantage estimator."""

    group_id: str
    """Episodes of one group are compared with each other."""
    reward: float
    num_tokens: int
    """Number of trained tokens. 0: the episode counts in its group's baseline, but is not
    trained."""
    penalties: Sequence[float] = ()
    """Penalty of each trained token, such as the KL penalty, which is subtracted from the reward.
    An empty sequence means no penalties."""
    is_greedy: bool = False
    """Whether the episode was sampled at temperature 0."""

    def __post_init__(self) -> None:
        assert len(self.penalties) in (0, self.num_tokens), "a penalty for each token, or none"

    @property
    def score(self) -> float:
        """The episode's score: its reward minus the penalties of all its tokens."""
        return self.reward - math.fsum(self.penalties)

    def returns(self, gamma: float) -> list[float]:
        """Compute the discounted return of each trained token: the sum of the rewards of this token
        and of all later tokens, discounted by `gamma` per token.

        The reward of the last token is the episode's reward; the reward of every other token is 0.
        The penalty of each token is subtracted from the reward of that token.
        """
        returns = [0.0] * self.num_tokens
        value = self.reward
        for position in reversed(range(self.num_tokens)):
            value -= self.penalties[position] if self.penalties else 0.0
            returns[position] = value
            value *= gamma
        return returns


@dataclass(frozen=True, slots=True)
class AdvantageSpec:
    """Settings of the advantage estimators. Each setting that verl also has keeps verl's name."""

    norm_adv_by_std_in_grpo: bool = True
    """Whether GRPO divides by the standard deviation. Without it, the algorithm is Dr. GRPO."""
    std_floor: float = 0.05
    """Smallest divisor. It keeps the noise of a judge's nearly equal rewards from being amplified.
    verl adds 1e-6 to the standard deviation instead."""
    gamma: float = 1.0
    """Discount factor per token."""


def by_group(
    outcomes: Sequence[Outcome], of_group: Callable[[list[Outcome]], Sequence[float]]
) -> list[float]:
    """Call `of_group` once for each group, with the outcomes of the group's episodes. `of_group`
    returns one number for each episode.

    Return these numbers in the order of `outcomes`.
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


def per_token(outcomes: Sequence[Outcome], numbers: Sequence[float]) -> list[list[float]]:
    """Return one list for each episode. The list repeats the episode's number once for each of the
    episode's trained tokens."""
    return [
        [number] * outcome.num_tokens for outcome, number in zip(outcomes, numbers, strict=True)
    ]


def centred(scores: Sequence[float]) -> list[float]:
    """Return each score minus the mean of the scores.

    If all scores are equal, or there is only one score, the results are exactly 0. A rounding error
    instead of 0 would become large when it is divided by a small standard deviation.
    """
    if not scores or min(scores) == max(scores):
        return [0.0] * len(scores)
    mean = statistics.fmean(scores)
    return [score - mean for score in scores]


def over_std(numbers: Sequence[float], scores: Sequence[float], floor: float) -> list[float]:
    """Return the numbers divided by the standard deviation of `scores` (with ddof 1), or divided by
    `floor` if the standard deviation is smaller than `floor`.

    With fewer than two scores, the numbers are returned undivided.
    """
    if len(scores) < 2:
        return list(numbers)
    divisor = max(statistics.stdev(scores), floor)
    return [number / divisor for number in numbers]
