"""PPO's clipped policy loss with dual clip.

    r = exp(log_prob - old_log_prob)
    L = max(-A r, -A clip(r, 1 - low, 1 + high))         and where A < 0
    L = min(L, -A c)

Schulman et al. 2017 (arXiv 1707.06347); dual clip: Ye et al. 2019 (arXiv 1912.09729); apart upper
bound: DAPO (arXiv 2503.14476). Equal to verl's `vanilla` (verl/trainer/ppo/core_algos.py), whose
numbers the tests hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fakevllm_server.backends.base import LossSpec

MAX_LOG_RATIO = 20.0
"""Keeps exp finite when a stale call's tokens have become impossible; verl's value."""


class PolicyLoss(NamedTuple):
    """[rows, tokens] each; zero outside the mask."""

    per_token: Tensor
    clipped: Tensor
    """1 where the clip decided, so that the token has no gradient."""
    clipped_lower: Tensor
    """1 where the dual clip decided."""


def vanilla(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor, spec: LossSpec
) -> PolicyLoss:
    """Tensors [rows, tokens] (advantages may broadcast); the gradient flows through `log_prob`
    only.
    """
    ratio = torch.exp(torch.clamp(log_prob - old_log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - spec.clip_ratio_low, 1 + spec.clip_ratio_high)
    upper = torch.maximum(plain, clipped)
    bound = -advantages * spec.clip_ratio_c
    negative = advantages < 0
    per_token = torch.where(negative, torch.minimum(upper, bound), upper)
    return PolicyLoss(
        per_token * mask,
        (clipped > plain) * mask,
        ((upper > bound) & negative) * mask,
    )
