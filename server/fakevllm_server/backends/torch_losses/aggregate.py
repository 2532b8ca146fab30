"""Average values over tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(
    per_token: Tensor, weights: Tensor, total_weight: Tensor | float | None = None
) -> Tensor:
    """Return the weighted mean over tokens. `per_token` and `weights` have the same shape. A token
    with weight 0 does not contribute.

    If `total_weight` is given, it is the divisor instead of the sum of `weights`. With the total
    weight of the whole batch as the divisor, the results of the micro-batches add up to the mean
    over the batch.
    """
    total = weights.sum() if total_weight is None else total_weight
    # Values outside the mask may be infinite or NaN, and 0 * inf is not 0.
    counted = torch.where(weights != 0, per_token, torch.zeros_like(per_token))
    return (counted * weights).sum() / total
