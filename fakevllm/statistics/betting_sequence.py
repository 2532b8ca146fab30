"""Betting confidence sequences: intervals for the mean of bounded observations. The intervals hold
at all times at once, and are narrower when the observations vary less.

Source: I. Waudby-Smith, A. Ramdas, "Estimating means of bounded random variables by betting",
Journal of the Royal Statistical Society B 86 (2024), theorem 1 and section 4: capital processes,
here with a mixture of constant bets.

Let X_1, X_2, ... be observations between `low` and `high`. Given all earlier observations, each X_i
has the expectation mu. For a candidate m of the mean, a gambler with the capital 1 bets that mu is
above m. The bet is a fraction g of the largest possible bet. After t observations, the gambler has
the capital K_t(m):

    K_t(m) = average over the fractions g of  product over i <= t of (1 + g * (X_i - m) / (m - low))

No factor is negative, because X_i is at least `low` and g is below 1. If mu = m, the expected
factor is 1, so K_t(m) is a nonnegative martingale. By Ville's inequality, the probability that
K_t(m) ever reaches 2 / alpha is then at most alpha / 2. K_t(m) falls as m rises. The lower end of
the interval is the m at which K_t(m) equals 2 / alpha, and bisection finds this m. The upper end is
computed in the same way from the mirrored observations. The probability that the interval ever
misses mu is at most alpha.

The bound needs no independence and no large sample. For the lower end alone, it is enough that no
conditional expectation is above m: the capital is then a supermartingale. Therefore a one-sided
statement also holds if the expectation changes from one observation to the next.

`BettingTest` compares the mean with one value, and keeps only one number per fraction.
`BettingSequence` computes the whole interval. This class keeps the observations on a grid. An
observation between two grid points is split into two parts, one at each of these points, so that
the mean stays the same. The logarithm is concave, so the grid can only lower the capital, and the
interval stays valid. The grid widens the interval by less than a thousandth of the range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fakevllm.statistics.confidence_sequence import ALPHA, Interval, RewardRange

FRACTIONS = (0.1, 0.17, 0.3, 0.52, 0.9)
"""Sizes of the bets, as fractions of the largest possible bet. Low fractions give narrow intervals
for many observations that vary much. High fractions give narrow intervals for few observations, or
for observations that vary little. In simulations with 50 to 2,000 pairs, more fractions or lower
fractions made the intervals wider."""
_HALVINGS = 16
"""Number of steps of the bisection. The error of an end of the interval is at most 1 / 65,536 of
the range."""
NUM_CELLS = 256
"""Number of cells of the grid to which the observations of an interval are rounded. With this
number, the computation of an interval takes about 50 ms in the worst case. Differences between
means of 2, 4, 8, ... rewards of 0 or 1 are on the grid exactly."""


class BettingTest:
    """Test whether the mean of observations is above or below one value. The observations lie
    between two known numbers. Unlike `BettingSequence`, the test does not round observations to a
    grid. Apart from the effect of this rounding, the two classes give the same results. The time to
    add an observation does not depend on the number of earlier observations.

    >>> rewards = BettingTest(RewardRange(0.0, 1.0), 0.9)
    >>> for _ in range(200):
    ...     rewards.add(1.0)
    >>> rewards.is_above, rewards.is_below
    (True, False)
    """

    def __init__(self, values: RewardRange, value: float, alpha: float = ALPHA) -> None:
        """Create a test of `value`, a number inside the range `values`. If the mean is `value`, the
        test wrongly reports "above" or "below" at some time with a probability of at most `alpha`.
        """
        assert values.low < value < values.high, "the value is inside the range"
        assert 0 < alpha < 0.5, "alpha is a small probability"
        self._range = values
        self._value = value
        self._log_limit = math.log(2 / alpha)
        self._logs_above = [0.0] * len(FRACTIONS)
        """For each fraction, the logarithm of the capital of a gambler who bets that the mean is
        above the value."""
        self._logs_below = [0.0] * len(FRACTIONS)

    def add(self, observation: float) -> None:
        """Add one observation to the test. It must be in the range that the test was created
        with."""
        assert self._range.low <= observation <= self._range.high, "observations are in their range"
        distance = observation - self._value
        above = distance / (self._value - self._range.low)
        below = distance / (self._value - self._range.high)
        for index, fraction in enumerate(FRACTIONS):
            self._logs_above[index] += math.log1p(fraction * above)
            self._logs_below[index] += math.log1p(fraction * below)

    @property
    def is_above(self) -> bool:
        """Whether the observations so far have shown that the true mean is above `value`."""
        return _log_mean(self._logs_above) >= self._log_limit

    @property
    def is_below(self) -> bool:
        """Whether the observations so far have shown that the true mean is below `value`."""
        return _log_mean(self._logs_below) >= self._log_limit


class BettingSequence:
    """Confidence sequence for the mean of observations that lie between two known numbers.

    >>> rewards = BettingSequence(RewardRange(0.0, 1.0))
    >>> for _ in range(200):
    ...     rewards.add(1.0)
    >>> interval = rewards.interval()
    >>> round(interval.low, 2), interval.mean, round(interval.high, 2)
    (0.97, 1.0, 1.0)
    >>> rewards.is_above(0.9), rewards.is_below(0.9)
    (True, False)
    """

    def __init__(self, values: RewardRange, alpha: float = ALPHA) -> None:
        """Create an empty sequence for observations in the range `values`. The interval misses the
        mean at some time with a probability of at most `alpha`."""
        assert 0 < alpha < 0.5, "alpha is a small probability"
        self._range = values
        self._log_limit = math.log(2 / alpha)
        self._weights = [0.0] * (NUM_CELLS + 1)
        """Weight of the observations at each point of the grid."""
        self._interval: tuple[int, Interval] | None = None
        """The interval that was computed last, with the number of its observations."""
        self.num = 0
        self.mean = 0.0
        """Mean of the observations; 0 without any."""

    def add(self, value: float) -> None:
        """Add one observation to the sequence. It must be in the range that the sequence was
        created with."""
        assert self._range.low <= value <= self._range.high, "observations are in their range"
        position = (value - self._range.low) / (self._range.high - self._range.low) * NUM_CELLS
        cell = min(int(position), NUM_CELLS - 1)
        self._weights[cell + 1] += position - cell
        self._weights[cell] += cell + 1 - position
        self.num += 1
        self.mean += (value - self.mean) / self.num

    def is_above(self, value: float) -> bool:
        """Return True if the whole confidence interval for the mean is above `value`, a number
        inside the range of the observations."""
        return self._log_capital(value, self._range.low) >= self._log_limit

    def is_below(self, value: float) -> bool:
        """Return True if the whole confidence interval for the mean is below `value`, a number
        inside the range of the observations."""
        return self._log_capital(value, self._range.high) >= self._log_limit

    def interval(self) -> Interval | None:
        """Return the confidence interval for the mean after the observations so far. Return None if
        there are no observations."""
        if self.num == 0:
            return None
        if self._interval is None or self._interval[0] != self.num:
            low, high = self._range.low, self._range.high
            mean = min(high, max(low, self.mean))
            interval = Interval(self._end(low, mean), mean, self._end(high, mean))
            self._interval = self.num, interval
        return self._interval[1]

    def _end(self, outer: float, inner: float) -> float:
        """Return one end of the interval. This end lies between `outer`, an end of the range, and
        `inner`, the mean. The result is rounded outwards."""
        bound = outer
        for _ in range(_HALVINGS):
            middle = (outer + inner) / 2
            if middle in (outer, inner):
                break
            if self._log_capital(middle, bound) >= self._log_limit:
                outer = middle
            else:
                inner = middle
        return outer

    def _log_capital(self, mean: float, bound: float) -> float:
        """Return the logarithm of the capital of a gambler. If `bound` is the low end of the range,
        the gambler bets that the true mean is above `mean`. If `bound` is the high end, the gambler
        bets that the true mean is below `mean`."""
        assert self._range.low < mean < self._range.high, "the mean is inside the range"
        low, width = self._range.low, self._range.high - self._range.low
        points = [
            (weight, (low + width * index / NUM_CELLS - mean) / (mean - bound))
            for index, weight in enumerate(self._weights)
            if weight > 0
        ]
        return _log_mean(
            [
                math.fsum(
                    weight * math.log1p(max(-1.0, gain) * fraction) for weight, gain in points
                )
                for fraction in FRACTIONS
            ]
        )


def _log_mean(logs: Sequence[float]) -> float:
    """Return the logarithm of the mean of numbers whose logarithms are `logs`."""
    largest = max(logs)
    total = math.fsum(math.exp(log - largest) for log in logs)
    return largest + math.log(total / len(logs))
