"""Advantage estimators that compare an episode with its group.

All tokens of an episode get the same advantage. The only episode of a group gets advantage 0;
verl's grpo, rloo, opo and gpg use its raw reward instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fakevllm_server.algorithms.advantage_input import (
    AdvantageSpec,
    Outcome,
    by_group,
    centred,
    over_std,
    per_token,
)


def grpo(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[list[float]]:
    """Compute GRPO: A = (r − mean) / max(std, floor), with ddof 1 for the standard deviation.

    DeepSeekMath, arXiv 2402.03300, eq. 3. Without `norm_adv_by_std_in_grpo`, A = r − mean, which is
    Dr. GRPO, arXiv 2503.20783 (its loss is `seq-mean-token-sum-norm`). verl divides by std + 1e-6
    instead of using a floor.

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
    """Compute RLOO: A = r − mean of the other rewards = N / (N − 1) · (r − mean).

    Ahmadian et al., arXiv 2402.14740.
    """

    def of_group(group: list[Outcome]) -> list[float]:
        leave_one_out = len(group) / max(len(group) - 1, 1)
        return [leave_one_out * value for value in centred([outcome.score for outcome in group])]

    return per_token(outcomes, by_group(outcomes, of_group))


def opo(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[list[float]]:
    """Compute OPO: A = r − Σ(length · r) / Σ length.

    This baseline minimizes the variance if gradients grow with the episode's length. Hao et al.,
    arXiv 2505.23585. The length is the number of trained tokens, so an episode that is masked from
    the loss does not count in the baseline.
    """

    def of_group(group: list[Outcome]) -> list[float]:
        scores = [outcome.score for outcome in group]
        num_tokens = sum(outcome.num_tokens for outcome in group)
        if num_tokens == 0 or not any(centred(scores)):
            return [0.0] * len(group)
        weighted = math.fsum(outcome.num_tokens * outcome.score for outcome in group)
        return [score - weighted / num_tokens for score in scores]

    return per_token(outcomes, by_group(outcomes, of_group))


def grpo_passk(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[list[float]]:
    """Compute pass@k GRPO: the best episode gets A = (best − second) / max(std, floor).

    All other episodes of the group get 0. If several episodes share the best reward, all get 0.
    Without `norm_adv_by_std_in_grpo`, A is not divided. Pass@k training, arXiv 2503.19595. verl
    raises an error for a group of one episode.
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
    """Compute GPG: A = α · (r − mean), α = number of episodes / number with a reward other than 0.

    Both numbers of α count the episodes of the whole step. Chu et al., arXiv 2504.02546. The loss
    of the paper is `gpg`, the plain policy gradient.
    """
    scores = [outcome.score for outcome in outcomes]
    alpha = len(scores) / max(sum(score != 0 for score in scores), 1)
    numbers = by_group(outcomes, lambda group: centred([outcome.score for outcome in group]))
    return per_token(outcomes, [alpha * number for number in numbers])
