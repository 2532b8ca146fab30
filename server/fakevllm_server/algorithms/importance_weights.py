"""Importance weights of tokens that were sampled with other model weights, and the effective sample
size of such importance weights. The functions do no I/O.

A token has the importance weight min(r, C). r is the token's probability under the current model
weights, divided by its probability when it was sampled. C is a bound. Without a bound, a few tokens
with a large r would decide the gradient (truncated importance sampling: E. Ionides, "Truncated
Importance Sampling", Journal of Computational and Graphical Statistics 17, 2008).

The effective sample size of n weights w is (Σ w)² / Σ w² (L. Kish, "Survey Sampling", 1965). It is
n if all weights are equal, and 1 if one weight is much larger than all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fakevllm_server.types.number_arrays import FloatArray, float_array


def truncated_weights(
    current: Sequence[float], sampled: Sequence[float], bound: float
) -> FloatArray:
    """Return the importance weight of each token. `current` has the log-probabilities under the
    current weights, and `sampled` those under the weights that sampled the tokens.

    Raises ValueError if a log-probability is NaN, or if the two lengths differ.

    >>> truncated_weights([-1.0, -1.0], [-1.0, -9.0], bound=2.0)
    [1.0, 2.0]
    """
    ratios = [now - then for now, then in zip(current, sampled, strict=True)]
    if any(map(math.isnan, ratios)):
        raise ValueError("a log-probability is not a number")
    largest = math.log(bound)
    # exp is not called for a ratio above the bound, for which it might overflow.
    return float_array(bound if ratio >= largest else math.exp(ratio) for ratio in ratios)


@dataclass(frozen=True, slots=True)
class WeightSums:
    """Sums over importance weights, from which their mean and effective sample size follow."""

    num: int
    total: float
    squares: float
    num_truncated: int
    """Number of weights that are at the bound."""

    @staticmethod
    def of(rows: Iterable[Sequence[float]], bound: float) -> WeightSums:
        """Return the sums over all importance weights in `rows`. A weight counts as truncated if it
        is at least `bound`.

        >>> WeightSums.of([[1.0], [1.0, 2.0]], bound=2.0).num_truncated
        1
        """
        weights = [weight for row in rows for weight in row]
        return WeightSums(
            len(weights),
            math.fsum(weights),
            math.fsum(weight * weight for weight in weights),
            sum(weight >= bound for weight in weights),
        )

    @property
    def mean(self) -> float:
        """The mean of the importance weights. There must be at least one weight."""
        return self.total / self.num

    @property
    def ess(self) -> float:
        """Effective sample size as a share of the number of weights: (Σ w)² / (n Σ w²). It is 0 if
        all weights are 0.

        >>> WeightSums.of([[1.0, 1.0]], 2.0).ess, WeightSums.of([[1.0, 0.0]], 2.0).ess
        (1.0, 0.5)
        """
        return self.total**2 / (self.num * self.squares) if self.squares else 0.0
