"""The policy loss of geometric-mean policy optimisation (GMPO).

    d = log_prob - old_log_prob, at most high if A > 0, and at least -low if A < 0
    L = -A exp(mean of d over the unit)              for each token of the unit

L is the loss of a token, and A is its advantage. d is the clipped log-ratio of a token, with the
clip bounds low and high (`clip_ratio_low`, `clip_ratio_high`). A unit is one sequence in the loss.
Source: Zhao et al., arXiv 2507.20673. The loss is equal to verl's `geo_mean`. It is designed for
the aggregation `seq-mean-token-mean`, which verl always uses for this loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_server.backends.torch_losses.policy_loss import (
    MAX_LOG_RATIO,
    PolicyLoss,
    unit_mean,
)


def geo_mean(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, units: Tensor, spec: LossSpec
) -> PolicyLoss:
    """Return the GMPO loss of each token. Each tensor has shape [tokens]. The tensors must contain
    all tokens of each unit (one sequence in the loss). `units` has the unit number of each
    token."""
    # verl leaves this log-ratio unbounded: one impossible token of a stale call makes it infinite.
    log_ratio = torch.clamp(log_prob - old_log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    bounded = torch.clamp(log_ratio, -spec.clip_ratio_low, spec.clip_ratio_high)
    sign = torch.sign(advantages)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * bounded)
    ratio = torch.exp(unit_mean(pessimistic, units))
    is_bounded = log_ratio != bounded
    return PolicyLoss(
        -advantages * ratio,
        (is_bounded & (advantages > 0)).to(ratio.dtype),
        (is_bounded & (advantages < 0)).to(ratio.dtype),
    )
