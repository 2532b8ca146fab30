"""Advantage estimators that compare an episode with its group.

All tokens of an episode get the same advantage. If a group has only one episode, this episode gets
advantage 0. verl's grpo, rloo, opo and gpg use the raw reward of such an episode instead.
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

    A is the advantage of an episode, and r is the reward of the episode. mean and std are the mean
    and the standard deviation of the rewards in the episode's group. Source: DeepSeekMath, arXiv
    2402.03300, eq. 3.

    If `norm_adv_by_std_in_grpo` is false, A = r − mean. This is the advantage of Dr. GRPO, arXiv
    2503.20783, whose loss mode is `seq-mean-token-sum-norm`. verl divides by std + 1e-6 instead of
    using a floor.

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

    A is the advantage of an episode, and r is the reward of the episode. The other rewards are
    those of the group's other episodes. N is the number of episodes in the group, and the last mean
    is taken over all N rewards. Source: Ahmadian et al., arXiv 2402.14740.
    """

    def of_group(group: list[Outcome]) -> list[float]:
        leave_one_out = len(group) / max(len(group) - 1, 1)
        return [leave_one_out * value for value in centred([outcome.score for outcome in group])]

    return per_token(outcomes, by_group(outcomes, of_group))


def opo(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[list[float]]:
    """Compute OPO: A = r − Σ(length · r) / Σ length.

    A is the advantage of an episode, r is a reward, and both sums run over the episodes of the
    group. The length of an episode is the number of its trained tokens. An episode that is masked
    from the loss has length 0, so it does not count in the baseline.

    The baseline minimizes the variance if gradients grow with the episode's length. Source: Hao et
    al., arXiv 2505.23585.
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

    A is the advantage. best and second are the two highest rewards of the group, and std is the
    standard deviation of the group's rewards. All other episodes of the group get advantage 0. If
    several episodes share the best reward, they also get 0. If `norm_adv_by_std_in_grpo` is false,
    A = best − second.

    Source: pass@k training, arXiv 2503.19595. The episode of a group with only one episode gets
    advantage 0, while verl raises an error.
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
    """Compute GPG: A = α · (r − mean), with α = number of episodes / number of episodes whose
    reward is not 0.

    A is the advantage of an episode, r is the reward of the episode, and mean is the mean reward of
    the group. Both counts in α include the episodes of the whole step. Source: Chu et al., arXiv
    2504.02546. The paper trains with the plain policy gradient, which is the policy loss `gpg`.
    """
    scores = [outcome.score for outcome in outcomes]
    alpha = len(scores) / max(sum(score != 0 for score in scores), 1)
    numbers = by_group(outcomes, lambda group: centred([outcome.score for outcome in group]))
    return per_token(outcomes, [alpha * number for number in numbers])
