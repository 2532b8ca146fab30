"""Estimators of KL(policy || reference) from samples of the policy."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
"""Both bounds are verl's (`low_var_kl`): one impossible token must not own the batch."""


def k3(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - policy: never negative, unbiased, low variance.

    Schulman, "Approximating KL divergence" (2020). Its gradient with respect to `log_prob` is 1 -
    exp(d), which is not the gradient of the KL.
    """
    difference = torch.clamp(reference_log_prob - log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.clamp(torch.exp(difference) - difference - 1, -MAX_K3, MAX_K3)
