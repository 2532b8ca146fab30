"""Estimators of KL(policy || reference) from samples of the policy.

Source: Schulman, "Approximating KL divergence" (2020). With d = log_prob - reference:

    k1  d                  unbiased value; the mean of its gradient is 0
    k2  d² / 2             biased value; the mean of its gradient is the gradient of the KL
    k3  exp(-d) + d - 1    unbiased value ≥ 0 of low variance; its gradient is not that of the KL

`k1+` and `k3+` have the values of k1 and k3, but the gradient of k2. verl has second names for
three of the estimators: kl for k1, mse for k2, and low_var_kl for k3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
"""Bounds in `k3`: MAX_LOG_RATIO for |d|, and MAX_K3 for the estimate. They keep one impossible
token from dominating the batch. Both values are verl's (`low_var_kl`)."""


def k1(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    return log_prob - reference_log_prob


def k2(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    return 0.5 * (log_prob - reference_log_prob).square()


def k3(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """Return the k3 estimate of the KL divergence for each token. The estimate is exp(-d) + d - 1
    with d = `log_prob` - `reference_log_prob`. The derivative of the estimate with respect to
    `log_prob` is 1 - exp(-d). The value is at most MAX_K3."""
    difference = torch.clamp(reference_log_prob - log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.clamp(torch.exp(difference) - difference - 1, -MAX_K3, MAX_K3)


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "kl": k1,
    "k2": k2,
    "mse": k2,
    "k3": k3,
    "low_var_kl": k3,
}


def kl_loss(log_prob: Tensor, reference_log_prob: Tensor, name: str) -> Tensor:
    """Return the KL estimate of each token (shape [tokens]). `name` is the name of the estimator,
    which is a value of the setting `kl_loss_type`. The reference log-probabilities get no
    gradient."""
    reference = reference_log_prob.detach()
    value = ESTIMATORS[name.removesuffix("+")](log_prob, reference)
    if not name.endswith("+"):
        return value
    k2_value = k2(log_prob, reference)
    return k2_value - k2_value.detach() + value.detach()
