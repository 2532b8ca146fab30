"""What is taken from a reward before it becomes an advantage."""

from __future__ import annotations

from collections.abc import Sequence


def kl_penalties(
    log_probs: Sequence[float], reference_log_probs: Sequence[float], coef: float
) -> list[float]:
    """KL in reward: β · (ℓ_old − ℓ_ref) for each token (k1), for `Outcome.penalties`.

    InstructGPT, arXiv 2203.02155; verl's `use_kl_in_reward` with `kl_ctrl.kl_coef`.

    >>> kl_penalties([-1.0, -2.0], [-1.5, -1.0], 0.5)
    [0.25, -0.5]
    """
    return [
        coef * (log_prob - reference)
        for log_prob, reference in zip(log_probs, reference_log_probs, strict=True)
    ]


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int, factor: float) -> float:
    """min(0, −(length − (max − buffer)) / buffer · factor): to be added to a reward.

    DAPO's soft overlong punishment, arXiv 2503.14476, eq. 13; verl's `overlong_buffer_cfg` of
    `len`, `penalty_factor`. `num_tokens` is the length of the answer.

    >>> [overlong_penalty(n, 100, 20, 1.0) for n in (80, 85, 100, 120)]
    [0.0, -0.25, -1.0, -2.0]
    """
    return min(0.0, -(num_tokens - (max_tokens - buffer)) / buffer * factor)
