"""The clipped policy loss of PPO, with dual clip.

    r = exp(log_prob - old_log_prob)
    L = max(-A r, -A clip(r, 1 - low, 1 + high))               if A >= 0
    L = min(max(-A r, -A clip(r, 1 - low, 1 + high)), -A c)    if A < 0

L is the loss of a token, A is its advantage, and r is its importance ratio. low and high are the
clip bounds (`clip_ratio_low`, `clip_ratio_high`). c is the upper bound of the ratio in dual clip
(`clip_ratio_c`).

Sources: PPO, Schulman et al. 2017, arXiv 1707.06347; dual clip, Ye et al. 2019, arXiv 1912.09729;
separate bounds low and high, DAPO, arXiv 2503.14476. DAPO uses high = 0.28 and the aggregation
`token-mean`. The loss is equal to verl's `vanilla` (verl/trainer/ppo/core_algos.py), which the
tests verify.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fakevllm_server.backends.torch_losses.policy_loss import PolicyLoss, ratio_of


class ClipSettings(Protocol):
    @property
    def clip_ratio_low(self) -> float: ...
    @property
    def clip_ratio_high(self) -> float: ...
    @property
    def clip_ratio_c(self) -> float: ...


def vanilla(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, units: Tensor, spec: ClipSettings
) -> PolicyLoss:
    """Return the PPO loss of each token. Only `log_prob` gets a gradient. The tensors may have any
    common shape. `advantages` may also have a shape that broadcasts to the common shape. `units` is
    unused: it is a parameter because all losses have the same parameters."""
    ratio = ratio_of(log_prob, old_log_prob)
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - spec.clip_ratio_low, 1 + spec.clip_ratio_high)
    upper = torch.maximum(plain, clipped)
    bound = -advantages * spec.clip_ratio_c
    negative = advantages < 0
    per_token = torch.where(negative, torch.minimum(upper, bound), upper)
    return PolicyLoss(
        per_token,
        (clipped > plain).to(per_token.dtype),
        ((upper > bound) & negative).to(per_token.dtype),
    )
