"""Estimate how much of a hook's rewards is noise, from equal answers that get different rewards.
This module does no I/O.

A judge that is a model may give the same answer a high reward once and a low reward later. Such
noise lowers the correlation with other rewards, and systematic errors of the hook lower this
correlation too. Training averages the noise out, but the model learns each systematic error.
Therefore two hooks whose rewards have the same correlation may train a model very differently.

The correlation without noise is Spearman's correction for attenuation: the correlation divided by
the square root of the rewards' reliability (C. Spearman, "The proof and measurement of association
between two things", 1904). The reliability is the share of the variance within groups that is not
noise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

LEAST_RELIABILITY = 0.05
"""Minimum reliability of rewards whose correlation is corrected. With a lower reliability, the
rewards are nearly all noise, and the corrected correlation would have no meaning."""


@dataclass(slots=True)
class _Variance:
    """The variance within several sets of numbers, around the mean of each set."""

    _squares: float = 0.0
    _num_free: int = 0
    """Degrees of freedom: the size of each set minus 1, summed over the sets."""

    def add(self, numbers: Sequence[float]) -> None:
        """Add one set of numbers to the pooled variance. The deviations of these numbers are
        computed from the mean of their own set."""
        if len(set(numbers)) > 1:  # otherwise rounding errors would look like noise
            mean = math.fsum(numbers) / len(numbers)
            self._squares += math.fsum((number - mean) ** 2 for number in numbers)
        self._num_free += len(numbers) - 1

    @property
    def value(self) -> float | None:
        """The variance of all added numbers around the means of their sets. None if no set has at
        least two numbers."""
        return self._squares / self._num_free if self._num_free else None


@dataclass(slots=True)
class RewardNoise:
    """Estimates how much of one hook's rewards is noise.

    `share` is the estimate from all answers and rewards that were given to `add`.

    >>> noise = RewardNoise()
    >>> noise.add(["yes", "yes", "no", "no"], [1.0, 1.0, 0.0, 0.0])
    >>> noise.share
    0.0
    """

    _equal: _Variance = field(default_factory=_Variance)
    _all: _Variance = field(default_factory=_Variance)

    def add(self, answers: Sequence[Hashable], rewards: Sequence[float]) -> None:
        """Include one group (the answers to one request) in the estimate: its answers, with the
        reward of each."""
        by_answer: defaultdict[Hashable, list[float]] = defaultdict(list)
        for answer, reward in zip(answers, rewards, strict=True):
            by_answer[answer].append(reward)
        self._all.add(rewards)
        for equal in by_answer.values():
            self._equal.add(equal)

    @property
    def share(self) -> float | None:
        """Share of the variance within groups that is noise, from 0 to 1. None if no group has two
        equal answers, or if all rewards of each group are equal."""
        noise, total = self._equal.value, self._all.value
        if noise is None or not total:
            return None
        return min(1.0, noise / total)

    def without_noise(self, correlation: float | None) -> float | None:
        """Return an estimate of `correlation` without the noise in the hook's rewards.
        `correlation` is a correlation of rewards within groups. Return None if no estimate is
        possible."""
        share = self.share
        if correlation is None or share is None or 1 - share < LEAST_RELIABILITY:
            return None
        return max(-1.0, min(1.0, correlation / math.sqrt(1 - share)))
