"""The GSPO policy loss. A unit is one sequence in the loss. The loss clips the importance ratio of
a whole unit.

    s = exp(mean of (log_prob - old_log_prob) over the unit)
    L = max(-A s, -A clip(s, 1 - low, 1 + high))     for each token of the unit

L is the loss of a token, A is its advantage, and s is the ratio of its unit. low and high are the
clip bounds (`clip_ratio_low`, `clip_ratio_high`). The usual bounds are narrow (low = 3e-4, high =
4e-4), because s is a geometric mean and stays close to 1. For the gradient, each token t has a
ratio of its own:

    s_t = sg(s) · π_t / sg(π_t)

Here sg stops the gradient, and π_t is the probability of the token. Therefore the derivative of L
with respect to the token's log_prob is -A s if the unit is not clipped.

Source: GSPO, arXiv 2507.18071, eq. 7 and 14. The loss is equal to verl's `gspo`, and is designed
for the aggregation `seq-mean-token-mean`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_server.backends.torch_losses.policy_loss import PolicyLoss, unit_mean

MAX_LOG_UNIT_RATIO = 10.0
"""Upper bound of a log-ratio, which keeps exp finite. verl uses the same value."""


def gspo(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, units: Tensor, spec: LossSpec
) -> PolicyLoss:
    """Return the GSPO loss of each token. Each tensor has shape [tokens]. The tensors must contain
    all tokens of each unit (one sequence in the loss). `units` has the unit number of each
    token."""
    log_unit_ratio = unit_mean((log_prob - old_log_prob).detach(), units)
    log_ratio = log_prob - log_prob.detach() + log_unit_ratio
    ratio = torch.exp(torch.clamp(log_ratio, max=MAX_LOG_UNIT_RATIO))
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - spec.clip_ratio_low, 1 + spec.clip_ratio_high)
    return PolicyLoss(
        torch.maximum(plain, clipped),
        (clipped > plain).to(ratio.dtype),
        torch.zeros_like(ratio),
    )
