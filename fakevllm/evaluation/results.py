"""The results of an evaluation: means, confidence intervals and comparisons. This module does no
I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fakevllm.statistics.confidence_sequence import (
    ALPHA,
    ConfidenceSequence,
    DifferenceSequence,
    Interval,
    RewardRange,
)

UNIT_RANGE = RewardRange(0.0, 1.0)
"""The range that rewards are assumed to have if the user names no other range."""


@dataclass(frozen=True, slots=True)
class RowScores:
    """The rewards of the samples of one dataset row."""

    rewards: Sequence[float]
    """Rewards of the samples at temperature 1. Samples without a reward are left out."""
    greedy: float | None
    """Reward of the greedy sample; None if this sample has no reward."""

    @property
    def mean(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    @property
    def best(self) -> float:
        """The highest reward of all samples of the row."""
        return max([*self.rewards, *([] if self.greedy is None else [self.greedy])])


Scores = Mapping[str, RowScores]
"""The scores of one version, by row id. A row without any reward is absent."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of one version of the weights with another. Only dataset rows for which both
    versions have rewards are compared, by their mean rewards."""

    wins: int
    losses: int
    ties: int
    difference: Interval | None
    """Mean difference with its interval; None if the versions have no row in common."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The mean rewards of one version of the weights over the dataset rows of an evaluation."""

    num_rows: int
    mean: Interval | None
    """Mean reward over the rows, with its interval; None without rows."""
    greedy: float | None
    """Mean reward of the greedy samples; None if no greedy sample has a reward."""


def summarize(
    scores: Scores,
    rewards: RewardRange,
    alpha: float = ALPHA,
    tuned_for: int | None = None,
) -> Summary:
    """Return the mean rewards of one version of the weights. Each dataset row counts equally,
    whatever the number of its samples is.

    The confidence interval is optimized for `tuned_for` rows. The default is the number of rows.
    Pass `tuned_for` if the number of rows was not fixed before the first sample."""
    means = ConfidenceSequence(rewards.sigma, alpha)
    if scores:
        typical = max(len(row.rewards) for row in scores.values())
        # Usually the number of rows is fixed before the first sample: the interval is optimised
        # for it.
        num = len(scores) if tuned_for is None else tuned_for
        means = ConfidenceSequence(rewards.variance(typical) ** 0.5, alpha, num)
    for row in scores.values():
        means.add(row.mean, rewards.variance(len(row.rewards)))
    greedy = [row.greedy for row in scores.values() if row.greedy is not None]
    mean = means.interval()
    return Summary(
        len(scores),
        None if mean is None else mean.within(rewards.low, rewards.high),
        sum(greedy) / len(greedy) if greedy else None,
    )


def compare(
    first: Scores,
    second: Scores,
    rewards: RewardRange,
    alpha: float = ALPHA,
    tuned_for: int | None = None,
) -> Comparison:
    """Compare the second version of the weights with the first, by their mean rewards for each
    dataset row. `tuned_for` has the same meaning as in `summarize`."""
    common = [(first[row_id], second[row_id]) for row_id in first if row_id in second]
    per_part = max((len(row.rewards) for pair in common for row in pair), default=1)
    num = max(1, len(common)) if tuned_for is None else tuned_for
    differences = DifferenceSequence(rewards, alpha, num, per_part)
    for one, other in common:
        differences.add(one.rewards, other.rewards)
    wins = sum(other.mean > one.mean for one, other in common)
    losses = sum(other.mean < one.mean for one, other in common)
    difference = differences.interval()
    width = rewards.high - rewards.low
    return Comparison(
        wins,
        losses,
        len(common) - wins - losses,
        None if difference is None else difference.within(-width, width),
    )


def unsolved_rows(versions: Sequence[Scores], solved_at: float) -> list[str]:
    """Return the ids of the dataset rows that no sample of any version of the weights has solved. A
    sample solves a row if its reward is at least `solved_at`. Rows without any reward are left
    out."""
    best: dict[str, float] = {}
    for scores in versions:
        for row_id, row in scores.items():
            best[row_id] = max(row.best, best.get(row_id, row.best))
    return [row_id for row_id, reward in best.items() if reward < solved_at]


def covering_range(declared: RewardRange, versions: Sequence[Scores]) -> RewardRange:
    """Return the reward range `declared`, extended so that it contains all rewards of the
    versions."""
    seen = [
        reward
        for scores in versions
        for row in scores.values()
        for reward in (*row.rewards, row.best)
    ]
    return RewardRange(min([declared.low, *seen]), max([declared.high, *seen]))
