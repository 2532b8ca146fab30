"""Advantages of an episode against its own group: one number for all its tokens.

A lone episode has nothing to be compared with and gets 0 everywhere; verl's grpo, rloo, opo and gpg
give it its raw reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fakevllm_server.algorithms.outcome import (
    AdvantageSpec,
    Outcome,
    by_group,
    centred,
    over_std,
    per_token,
)


def grpo(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[list[float]]:
    """A = (r − mean) / max(std, floor), std with ddof 1; A = r − mean where
    `norm_adv_by_std_in_grpo` is off.

    DeepSeekMath, arXiv 2402.03300, eq. 3; without std Dr. GRPO, arXiv 2503.20783 (its loss:
    `seq-mean-token-sum-norm`). The floor is ours; verl divides by std + 1e-6.

    >>> grpo([Outcome("g", 1.0, 1), Outcome("g", 0.0, 2)], AdvantageSpec())
    [[0.7071067811865475], [-0.7071067811865475, -0.7071067811865475]]
    """

    def of_group(group: list[Outcome]) -> list[float]:
        scores = [outcome.score for outcome in group]
        if not spec.norm_adv_by_std_in_grpo:
            return centred(scores)
        return over_std(centred(scores), scores, spec.std_floor)

    return per_token(outcomes, by_group(outcomes, of_group))


def rloo(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[list[float]]:
    """A = r − mean of the others = N / (N − 1) · (r − mean).

    Ahmadian et al., arXiv 2402.14740.
    """

    def of_group(group: list[Outcome]) -> list[float]:
        leave_one_out = len(group) / max(len(group) - 1, 1)
        return [leave_one_out * value for value in centred([outcome.score for outcome in group])]

    return per_token(outcomes, by_group(outcomes, of_group))


def opo(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[list[float]]:
    """A = r − Σ(length · r) / Σ length: the baseline of least variance, for gradients whose size
    grows with length.

    Hao et al., arXiv 2505.23585. The length is that of the trained tokens, so an episode that is
    masked from the loss does not count in this baseline.
    """

    def of_group(group: list[Outcome]) -> list[float]:
        scores = [outcome.score for outcome in group]
        num_tokens = sum(outcome.num_tokens for outcome in group)
        if num_tokens == 0 or not any(centred(scores)):
            return [0.0] * len(group)
        weighed = math.fsum(outcome.num_tokens * outcome.score for outcome in group)
        return [score - weighed / num_tokens for score in scores]

    return per_token(outcomes, by_group(outcomes, of_group))


def grpo_passk(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[list[float]]:
    """Only the best episode: A = (best − second) / max(std, floor), or without the divisor where
    `norm_adv_by_std_in_grpo` is off; all others 0, and so all of a tie for the best.

    Pass@k training, arXiv 2503.19595. verl raises for a group of one.
    """

    def of_group(group: list[Outcome]) -> list[float]:
        scores = [outcome.score for outcome in group]
        if len(group) < 2:
            return [0.0] * len(group)
        second, best = sorted(scores)[-2:]
        lead = [best - second if score == best else 0.0 for score in scores]
        if not spec.norm_adv_by_std_in_grpo:
            return lead
        return over_std(lead, scores, spec.std_floor)

    return per_token(outcomes, by_group(outcomes, of_group))


def gpg(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[list[float]]:
    """A = α · (r − mean), α = episodes of the step / those whose reward is not 0.

    Chu et al., arXiv 2504.02546, whose loss is `gpg`: the plain policy gradient.
    """
    scores = [outcome.score for outcome in outcomes]
    alpha = len(scores) / max(sum(score != 0 for score in scores), 1)
    numbers = by_group(outcomes, lambda group: centred([outcome.score for outcome in group]))
    return per_token(outcomes, [alpha * number for number in numbers])
