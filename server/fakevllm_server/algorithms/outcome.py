"""What an advantage is computed from, and the arithmetic that estimators share."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scored episode."""

    group_id: str
    """Episodes of one group are compared with each other."""
    reward: float
    num_tokens: int
    """Its trained tokens; 0 where it only counts in its group's baseline."""
    penalties: Sequence[float] = ()
    """Taken from the reward of each trained token, as by KL in reward; empty means none."""
    is_greedy: bool = False
    """Sampled at temperature 0."""

    def __post_init__(self) -> None:
        assert len(self.penalties) in (0, self.num_tokens), "a penalty for each token, or none"

    @property
    def score(self) -> float:
        """The sum of its tokens' rewards."""
        return self.reward - math.fsum(self.penalties)

    def returns(self, gamma: float) -> list[float]:
        """Per trained token: its reward and the discounted ones after it. The reward is the last
        token's."""
        returns = [0.0] * self.num_tokens
        following = self.reward
        for at in reversed(range(self.num_tokens)):
            following -= self.penalties[at] if self.penalties else 0.0
            returns[at] = following
            following *= gamma
        return returns


@dataclass(frozen=True, slots=True)
class AdvantageSpec:
    """Settings of the estimators, by verl's names where verl has them."""

    norm_adv_by_std_in_grpo: bool = True
    """False is Dr. GRPO."""
    std_floor: float = 0.05
    """Least divisor, so that judge noise is not blown up. verl adds 1e-6 instead."""
    gamma: float = 1.0


def by_group(
    outcomes: Sequence[Outcome], of_group: Callable[[list[Outcome]], Sequence[float]]
) -> list[float]:
    """`of_group`'s number for each outcome, in the order of `outcomes`."""
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, outcome in enumerate(outcomes):
        places[outcome.group_id].append(place)
    numbers = [0.0] * len(outcomes)
    for own in places.values():
        found = of_group([outcomes[place] for place in own])
        for place, number in zip(own, found, strict=True):
            numbers[place] = number
    return numbers


def per_token(outcomes: Sequence[Outcome], numbers: Sequence[float]) -> list[list[float]]:
    """The same advantage for every token of an episode."""
    return [
        [number] * outcome.num_tokens for outcome, number in zip(outcomes, numbers, strict=True)
    ]


def centred(scores: Sequence[float]) -> list[float]:
    """Less their mean. Equal scores, and so a lone one, give exact zeros: nothing is compared, and
    rounding noise would grow where it is divided."""
    if not scores or min(scores) == max(scores):
        return [0.0] * len(scores)
    mean = statistics.fmean(scores)
    return [score - mean for score in scores]


def over_std(numbers: Sequence[float], scores: Sequence[float], floor: float) -> list[float]:
    """Divided by the standard deviation of `scores` (ddof 1), or by `floor` where that is more."""
    if len(scores) < 2:
        return list(numbers)
    divisor = max(statistics.stdev(scores), floor)
    return [number / divisor for number in numbers]
