"""Penalties that change the rewards before the advantages are computed. The module also checks if
all rewards are equal."""

from __future__ import annotations

from collections.abc import Sequence

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.types.calls import FinishedGroup, ScoredEpisode


def kl_penalties(
    log_probs: Sequence[float], reference_log_probs: Sequence[float], coef: float
) -> list[float]:
    """Return the KL penalty of each token: coef · (ℓ_old − ℓ_ref). The advantage estimators get
    these values as the `penalties` of an `Outcome`, and subtract them from the reward.

    ℓ_old is the token's log-probability under the old policy (`log_probs`), and ℓ_ref is its
    log-probability under the reference policy (`reference_log_probs`). The difference ℓ_old − ℓ_ref
    is the k1 estimator of the KL divergence. Source: InstructGPT, arXiv 2203.02155. verl computes
    the same penalty with `use_kl_in_reward` and `kl_ctrl.kl_coef`.

    >>> kl_penalties([-1.0, -2.0], [-1.5, -1.0], 0.5)
    [0.25, -0.5]
    """
    return [
        coef * (log_prob - reference)
        for log_prob, reference in zip(log_probs, reference_log_probs, strict=True)
    ]


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int, factor: float) -> float:
    """Return the length penalty for an answer of `num_tokens` tokens. The penalty is ≤ 0, and is
    added to the reward.

    The penalty is min(0, −(num_tokens − (max_tokens − buffer)) / buffer · factor). It is 0 up to
    `max_tokens` − `buffer` tokens, and −`factor` at `max_tokens` tokens. Source: soft overlong
    punishment in DAPO, arXiv 2503.14476, eq. 13. verl computes the same penalty with
    `overlong_buffer_cfg`, in which `len` is the buffer and `penalty_factor` is the factor.

    >>> [overlong_penalty(n, 100, 20, 1.0) for n in (80, 85, 100, 120)]
    [0.0, -0.25, -1.0, -2.0]
    """
    return min(0.0, -(num_tokens - (max_tokens - buffer)) / buffer * factor)


def overlong_penalties(group: FinishedGroup, job: TrainJob) -> list[float]:
    """Return the length penalty of each episode in `group.scored` (the episodes with a reward). A
    penalty is a number ≤ 0 to add to the episode's reward.

    The penalty depends on the number of tokens of the episode's longest answer. All penalties are 0
    if the job does not set an overlong buffer (`overlong_buffer_len`), or does not set a maximum
    answer length.
    """
    buffer, longest = job.overlong_buffer_len, job.max_answer_length
    if buffer is None or longest is None:
        return [0.0] * len(group.scored)
    factor = job.overlong_penalty_factor
    return [overlong_penalty(_length(one), longest, buffer, factor) for one in group.scored]


def shaped_rewards(group: FinishedGroup, job: TrainJob) -> list[float]:
    """Return reward + length penalty for each episode in `group.scored` (the episodes with a
    reward). KL penalties are not included."""
    penalties = overlong_penalties(group, job)
    return [reward + penalty for reward, penalty in zip(group.rewards, penalties, strict=True)]


def is_tied(rewards: Sequence[float]) -> bool:
    """Return True if all rewards are equal, or if there are no rewards. Equal rewards give no
    training signal to an estimator that compares rewards."""
    return not rewards or min(rewards) == max(rewards)


def _length(episode: ScoredEpisode) -> int:
    """Return the number of tokens of an episode's longest answer."""
    return max((len(call.response_ids) for call in episode.calls), default=0)
