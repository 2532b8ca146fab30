"""Advantages of one group."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def grpo(rewards: Sequence[float], std_floor: float) -> list[float]:
    """A = (r − mean) / max(std, floor), std with ddof 1 [DeepSeekMath, arXiv 2402.03300, eq. 3;
    the floor is ours].

    Equal rewards give exact zeros (dividing rounding noise by a small number would not), and so
    does a lone reward,
    which has nothing to be compared with.

    >>> grpo([1.0, 0.0], 0.05)
    [0.7071067811865475, -0.7071067811865475]
    """
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    divisor = max(statistics.stdev(rewards), std_floor)
    return [(reward - mean) / divisor for reward in rewards]
