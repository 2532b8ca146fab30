"""Advantage estimators that compare an episode with the other episodes of its group.

All tokens of an episode get the same advantage. An episode that is alone in its group gets
advantage 0. In verl, the estimators grpo, rloo, opo and gpg give such an episode its raw reward as
the advantage.
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
from fakevllm_server.types.number_arrays import FloatArray


def grpo(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[FloatArray]:
    """Compute the GRPO advantage: A = (r − mean) / max(std, spec.std_floor).

    r is the episode's reward minus its token penalties. mean and std are the mean and the sample
    standard deviation (ddof 1) of r over the group. The result has one list per episode, with one
    advantage per trained token. Source: DeepSeekMath, arXiv 2402.03300, eq. 3.

    If `spec.norm_adv_by_std_in_grpo` is false, A = r − mean. This is the advantage of Dr. GRPO,
    arXiv 2503.20783. Dr. GRPO also needs the loss aggregation `seq-mean-token-sum-norm`. verl has
    no floor and divides by std + 1e-6.

    >>> grpo([Outcome("g", 1.0, 1), Outcome("g", 0.0, 2)], AdvantageSpec())
    [[0.7071067811865475], [-0.7071067811865475, -0.7071067811865475]]
    """

    def of_group(group: list[Outcome]) -> list[float]:
        scores = [outcome.score for outcome in group]
        if not spec.norm_adv_by_std_in_grpo:
            return centred(scores)
        return over_std(centred(scores), scores, spec.std_floor)

    return per_token(outcomes, by_group(outcomes, of_group))


def rloo(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[FloatArray]:
    """Compute the RLOO advantage: A = r − (mean of r over the group's other episodes).

    r is the episode's reward minus its token penalties. If the group has N episodes, and m is the
    mean of r over all of them, then A = N / (N − 1) · (r − m). The result has one list per episode,
    with one advantage per trained token. Source: Ahmadian et al., arXiv 2402.14740.
    """

    def of_group(group: list[Outcome]) -> list[float]:
        leave_one_out = len(group) / max(len(group) - 1, 1)
        return [leave_one_out * value for value in centred([outcome.score for outcome in group])]

    return per_token(outcomes, by_group(outcomes, of_group))


def opo(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[FloatArray]:
    """Compute the OPO advantage: A = r − Σ(length · r) / Σ length.

    r is an episode's reward minus its token penalties, and length is the number of the episode's
    trained tokens. Both sums run over the episodes of the group. An episode that is masked from the
    loss has length 0, so it does not count in the baseline. The result has one list per episode,
    with one advantage per trained token.

    The paper assumes that the squared norm of an episode's gradient is proportional to the
    episode's length. Under this assumption, the baseline minimizes the variance of the gradient.
    Source: Hao et al., arXiv 2505.23585.
    """

    def of_group(group: list[Outcome]) -> list[float]:
        scores = [outcome.score for outcome in group]
        num_tokens = sum(outcome.num_tokens for outcome in group)
        if num_tokens == 0 or not any(centred(scores)):
            return [0.0] * len(group)
        weighted = math.fsum(outcome.num_tokens * outcome.score for outcome in group)
        return [score - weighted / num_tokens for score in scores]

    return per_token(outcomes, by_group(outcomes, of_group))


def grpo_passk(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[FloatArray]:
    """Compute the advantage of pass@k GRPO. The best episode of a group gets the advantage
    A = (best − second) / max(std, spec.std_floor). All other episodes get advantage 0.

    An episode's score is its reward minus its token penalties. best and second are the two highest
    scores in the group. std is the sample standard deviation (ddof 1) of all scores in the group.
    If several episodes share the best score, best − second is 0. If `spec.norm_adv_by_std_in_grpo`
    is false, A = best − second. The result has one list per episode, with one advantage per trained
    token.

    An episode that is alone in its group gets advantage 0, while verl raises an error. Source:
    pass@k training, arXiv 2503.19595.
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


def gpg(outcomes: Sequence[Outcome], spec: AdvantageSpec) -> list[FloatArray]:
    """Compute the GPG advantage: A = α · (r − mean).

    r is the episode's reward minus its token penalties, and mean is the mean of r over the group.
    α = (number of episodes in the step) / (number of episodes in the step with r ≠ 0). The result
    has one list per episode, with one advantage per trained token.

    Source: Chu et al., arXiv 2504.02546. The paper combines this advantage with the plain policy
    gradient (here the policy loss `gpg`).
    """
    scores = [outcome.score for outcome in outcomes]
    alpha = len(scores) / max(sum(score != 0 for score in scores), 1)
    numbers = by_group(outcomes, lambda group: centred([outcome.score for outcome in group]))
    return per_token(outcomes, [alpha * number for number in numbers])
