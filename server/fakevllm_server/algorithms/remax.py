"""Advantages against a greedy answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from fakevllm_server.algorithms.outcome import AdvantageSpec, Outcome


class NoBaseline(ValueError):
    """Groups without a greedy answer; the message names them and says what to do."""


def remax(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[list[float]]:
    """A_t = Σ_{s ≥ t} r_s − b, with b the reward of the greedy answer (temperature 0) to the same
    request, or the mean of several.

    Li et al., arXiv 2310.10505. The greedy answer's own advantage is 0. Raises NoBaseline for a
    group that has none: a baseline of 0 in its place would push up whatever was sampled.
    """
    greedy: defaultdict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.is_greedy:
            greedy[outcome.group_id].append(outcome.score)
    missing = sorted({outcome.group_id for outcome in outcomes} - set(greedy))
    if missing:
        raise NoBaseline(
            f"remax needs the reward of a greedy answer, and {len(missing)} groups have none "
            f"({', '.join(missing[:3])}): sample and score one at temperature 0, or take another "
            "algorithm"
        )
    return [
        [0.0] * outcome.num_tokens
        if outcome.is_greedy
        else [value - fmean(greedy[outcome.group_id]) for value in outcome.returns(1.0)]
        for outcome in outcomes
    ]
