"""Normal-mixture confidence sequences: intervals for a mean that hold at all times at once.

Source: S. R. Howard, A. Ramdas, J. McAuliffe, J. Sekhon, "Time-uniform, nonparametric,
nonasymptotic confidence sequences", Annals of Statistics 49 (2021). `NMix` below is equation 14 of
this paper, the two-sided normal mixture. rho is chosen as in proposition 3.

The formulas use these symbols. X_1, X_2, ... are the observations. E_i is the expectation of X_i
given all earlier observations. The error X_i - E_i is sub-Gaussian with the scale sigma_i. V is the
sum of sigma_i ** 2 over the first t observations.

With a probability of at least 1 - alpha, this inequality holds for all t at the same time:

    | sum of X_i - sum of E_i |  <=  NMix(V) = sqrt((V + rho) * log((V + rho) / (rho * alpha ** 2)))

Therefore this interval contains the mean of E_1, ..., E_t, for all t at the same time:

    mean of X_i  -  NMix(V) / t   to   mean of X_i  +  NMix(V) / t

An ordinary 95 % interval holds only for one number of observations, chosen in advance. Someone who
looks at an ordinary interval after each observation will almost surely see it miss the truth at
some time.

The bound needs no independence, no equal distributions and no large sample. It needs only the
scales sigma_i. By Hoeffding's lemma, an observation between `low` and `high` is sub-Gaussian with
sigma = (high - low) / 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALPHA = 0.05
"""Default probability with which an interval misses the truth at some time."""
TUNED_FOR = 100
"""Default number of observations for which the interval is made as narrow as possible. After any
other number of observations, the interval is valid too. Between a quarter of TUNED_FOR and five
times TUNED_FOR observations, the interval is at most 20 % wider than an interval that is tuned for
the actual number of observations."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with the confidence interval around it.

    >>> Interval(0.25, 0.5, 0.75).contains(0.3)
    True
    """

    low: float
    mean: float
    high: float

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    def within(self, low: float, high: float) -> Interval:
        """Return the part of the interval between `low` and `high`. `low` is the smallest possible
        mean, and `high` is the largest possible mean."""
        return Interval(max(low, self.low), self.mean, min(high, self.high))


@dataclass(frozen=True, slots=True)
class RewardRange:
    """The smallest and the largest possible reward.

    >>> RewardRange(0.0, 1.0).sigma
    0.5
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        assert math.isfinite(self.low) and math.isfinite(self.high), "a range has two finite ends"
        assert self.low < self.high, "the low end of a range is below its high end"

    @property
    def sigma(self) -> float:
        """Sub-Gaussian scale of a reward in this range: half the width (Hoeffding's lemma)."""
        return (self.high - self.low) / 2

    def variance(self, num: int) -> float:
        """Return sigma ** 2 / num, the squared sub-Gaussian scale of a mean of `num` rewards. Given
        the earlier observations, these rewards must be independent of each other."""
        return self.sigma**2 / num


class ConfidenceSequence:
    """Confidence sequence for the mean of observations whose sub-Gaussian scale is known.

    >>> rewards = ConfidenceSequence(sigma=0.5)
    >>> for _ in range(200):
    ...     rewards.add(1.0)
    >>> interval = rewards.interval()
    >>> round(interval.low, 2), interval.mean, round(interval.high, 2)
    (0.89, 1.0, 1.11)
    """

    def __init__(self, sigma: float, alpha: float = ALPHA, tuned_for: float = TUNED_FOR) -> None:
        """Create an empty sequence. `sigma` is the sub-Gaussian scale of an observation. The
        interval is made as narrow as possible for `tuned_for` observations of this scale. `sigma`
        and `tuned_for` must be chosen before the first observation."""
        assert sigma > 0, "sigma is positive"
        self._variance_of_one = sigma**2
        self._alpha = alpha
        self._rho = best_rho(self._variance_of_one * tuned_for, alpha)
        self._sum = 0.0
        self._variance = 0.0
        self.num = 0

    def add(self, value: float, variance: float | None = None) -> None:
        """Add one observation to the sequence. By default, the observation has the sub-Gaussian
        scale `sigma` of the sequence. For another scale, pass the square of the scale as
        `variance`. `variance` must not depend on `value`."""
        assert math.isfinite(value), "observations are finite"
        self._sum += value
        self._variance += self._variance_of_one if variance is None else variance
        self.num += 1

    def interval(self) -> Interval | None:
        """Return the confidence interval for the mean of the observations that were added so far.
        Return None if there are no observations."""
        if self.num == 0:
            return None
        mean = self._sum / self.num
        radius = normal_mixture(self._variance, self._rho, self._alpha) / self.num
        return Interval(mean - radius, mean, mean + radius)


class DifferenceSequence:
    """Confidence sequence for a paired difference: the mean of the second part minus the mean of
    the first part. The two parts of a pair are rewards for the same row, or rewards of two sessions
    that form a pair.

    A pair is one observation: the difference between the mean rewards of its two parts. The rewards
    of one part must be independent of each other given the pair. More rewards per part then make
    the interval narrower. Samples for one row are independent in this sense. Turns of a session are
    not independent, so pass their mean (see `session_means`).

    >>> gain = DifferenceSequence(RewardRange(0.0, 1.0))
    >>> for _ in range(400):
    ...     gain.add([0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0])
    >>> interval = gain.interval()
    >>> round(interval.low, 2), interval.mean, round(interval.high, 2)
    (0.45, 0.5, 0.55)
    """

    def __init__(
        self,
        rewards: RewardRange,
        alpha: float = ALPHA,
        tuned_for: float = TUNED_FOR,
        num_per_part: int = 1,
    ) -> None:
        """Create an empty sequence. `rewards` is the range of a single reward. The choice of
        `tuned_for` and `num_per_part` does not affect whether the interval is valid. The interval
        is made as narrow as possible for `tuned_for` pairs, if each of the two parts of a pair has
        `num_per_part` rewards."""
        self._rewards = rewards
        sigma = math.sqrt(2 * rewards.variance(num_per_part))
        self._differences = ConfidenceSequence(sigma, alpha, tuned_for)

    @property
    def num(self) -> int:
        """Number of pairs that were added so far."""
        return self._differences.num

    def add(self, first: Sequence[float], second: Sequence[float]) -> None:
        """Add a pair to the sequence. `first` has the rewards of its first part, and `second` has
        the rewards of its second part. Each part needs at least one reward."""
        difference = sum(second) / len(second) - sum(first) / len(first)
        variance = self._rewards.variance(len(first)) + self._rewards.variance(len(second))
        self._differences.add(difference, variance)

    def interval(self) -> Interval | None:
        """Return the confidence interval for the mean difference of the pairs that were added so
        far. Return None if there are no pairs."""
        return self._differences.interval()


def normal_mixture(variance: float, rho: float, alpha: float) -> float:
    """Return NMix(variance), the two-sided normal-mixture boundary for a sum of errors (see the
    module's docstring).

    >>> round(normal_mixture(variance=25.0, rho=3.0, alpha=0.05), 2)
    15.18
    """
    total = variance + rho
    return math.sqrt(total * math.log(total / (rho * alpha**2)))


def best_rho(variance: float, alpha: float) -> float:
    """Return the rho with the smallest `normal_mixture` at this variance.

    Let y = variance / rho. The minimum is at the solution of y = log((1 + y) / alpha ** 2). The
    solution is found by fixed-point iteration. The iteration converges, because y is above 1 and
    the derivative of the right side is 1 / (1 + y).

    >>> rho = best_rho(25.0, 0.05)
    >>> min(normal_mixture(25.0, rho * factor, 0.05) for factor in (0.9, 1.0, 1.1)) == (
    ...     normal_mixture(25.0, rho, 0.05)
    ... )
    True
    """
    assert variance > 0 and 0 < alpha < 0.5, (
        "variance is positive, and alpha is a small probability"
    )
    log_inverse = -2 * math.log(alpha)
    y = log_inverse
    for _ in range(_ITERATIONS):
        y = log_inverse + math.log1p(y)
    return variance / y


_ITERATIONS = 40
"""Number of fixed-point iterations. Each iteration more than halves the error, so the remaining
error is negligible."""
