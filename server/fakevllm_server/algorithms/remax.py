"""The advantage estimator ReMax. Its baseline is the reward of a greedy answer: an answer that was
sampled at temperature 0 for the same request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from fakevllm_server.algorithms.advantage_input import AdvantageSpec, Outcome
from fakevllm_server.types.number_arrays import FloatArray, float_array, repeated


class NoBaseline(ValueError):
    """Raised if a group has no greedy answer (sampled at temperature 0), which ReMax needs as the
    baseline. The message contains the ids of up to three such groups."""


def remax(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[FloatArray]:
    """Compute the ReMax advantage: A_t = Σ_{s ≥ t} r_s − b.

    A_t is the advantage of token t of an episode. r_s is the reward of token s: the token's penalty
    with the opposite sign. The reward of the last token also includes the episode's reward. The
    baseline b is the reward of the group's greedy answer (sampled at temperature 0), minus the
    token penalties of this answer. If the group has several greedy answers, b is the mean over
    these answers. A greedy answer itself gets advantage 0. The result has one list per episode,
    with one advantage per trained token. Source: Li et al., arXiv 2310.10505.

    Raises NoBaseline if a group has no greedy answer. A baseline of 0 would be wrong, because
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
        repeated(0.0, outcome.num_tokens)
        if outcome.is_greedy
        else float_array(
            [value - fmean(greedy[outcome.group_id]) for value in outcome.returns(1.0)]
        )
        for outcome in outcomes
    ]
