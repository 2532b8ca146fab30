"""The CISPO policy loss. The loss clips the importance weight instead of the update. Therefore no
token loses its gradient.

    L = -sg(clip(r, 1 - low, 1 + high)) A log_prob

L is the loss of a token, A is its advantage, and r = exp(log_prob - old_log_prob) is its importance
weight. low and high are the clip bounds (`clip_ratio_low`, `clip_ratio_high`), and sg stops the
gradient. A `clip_ratio_low` of 10 means no lower bound. Source: MiniMax-M1, arXiv 2506.13585, eq.
4. The loss is equal to verl's `cispo`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_server.backends.torch_losses.policy_loss import PolicyLoss, ratio_of


def cispo(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, units: Tensor, spec: LossSpec
) -> PolicyLoss:
    """Return the CISPO loss of each token. Each tensor has shape [tokens]. In the result, `clipped`
    marks the tokens whose importance weight is outside the clip bounds. `units` is unused."""
    ratio = ratio_of(log_prob, old_log_prob).detach()
    weight = torch.clamp(ratio, 1 - spec.clip_ratio_low, 1 + spec.clip_ratio_high)
    return PolicyLoss(
        -weight * advantages * log_prob,
        (ratio != weight).to(log_prob.dtype),
        torch.zeros_like(log_prob),
    )
