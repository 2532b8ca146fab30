"""The SAPO policy loss. The loss has a soft gate instead of a clip. The gate is a sigmoid of the
importance ratio.

    L = -A · 4/τ · sigmoid(τ (r - 1)),   τ = tau_pos if A > 0, else tau_neg

L is the loss of a token, A is its advantage, and r is its importance ratio π / π_old. Source: SAPO,
arXiv 2511.20347. The loss is equal to verl's `sapo`. It is designed for the aggregation
`seq-mean-token-mean`, which verl always uses for this loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_server.backends.torch_losses.policy_loss import PolicyLoss, ratio_of, unclipped


def sapo(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, units: Tensor, spec: LossSpec
) -> PolicyLoss:
    """Return the SAPO loss of each token. Each tensor has shape [tokens]. `units` is unused: it is
    a parameter because all losses have the same parameters."""
    ratio = ratio_of(log_prob, old_log_prob)
    tau = torch.where(advantages > 0, spec.tau_pos, spec.tau_neg).to(ratio.dtype)
    return unclipped(-advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1)))
