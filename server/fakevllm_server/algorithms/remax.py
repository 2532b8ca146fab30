"""Advantage estimator that compares an episode with a greedy answer to the same request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from fakevllm_server.algorithms.advantage_input import AdvantageSpec, Outcome


class NoBaseline(ValueError):
    """Raised if some groups have no greedy answer, which ReMax needs as the baseline. The message
    contains the ids of some of these groups."""


def remax(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[list[float]]:
    """Compute ReMax: A_t = Σ_{s ≥ t} r_s − b.

    A_t is the advantage of token t, and r_s is the reward of token s. The baseline b is the reward
    of the group's greedy answer (temperature 0). If the group has several greedy answers, b is the
    mean of their rewards. A greedy answer itself gets advantage 0. Source: Li et al., arXiv
    2310.10505.

    Raises NoBaseline if a group has no greedy answer. The baseline cannot be 0 instead, because
    training would then raise the probability of every sampled answer with a positive reward.
    """
    greedy: defaultdict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.is_greedy:
            greedy[outcome.group_id].append(outcome.score)
    missing = sorted({outcome.group_id for outcome in outcomes} - set(greedy))
    if missing:
        raise NoBaseline(
            f"remax needs the reward of a greedy answer, and {len(missing)} groups have none "
            f"({', '.join(missing[:3])}): sample and score one answer of each group at temperature "
            "0, or choose another algorithm"
        )
    return [
        [0.0] * outcome.num_tokens
        if outcome.is_greedy
        else [value - fmean(greedy[outcome.group_id]) for value in outcome.returns(1.0)]
        for outcome in outcomes
    ]
