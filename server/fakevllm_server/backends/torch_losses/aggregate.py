"""Average the losses of tokens to one number."""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(
    per_token: Tensor, weights: Tensor, total_weight: Tensor | float | None = None
) -> Tensor:
    """Return the weighted mean over tokens. `per_token` and `weights` have the same shape.
    `weights` is 0 for tokens that do not count.

    `total_weight` replaces the sum of `weights` as the divisor. If `total_weight` is the sum over
    the whole batch, the results of the micro-batches add up to the mean over the batch, for any
    division into micro-batches.
    """
    total = weights.sum() if total_weight is None else total_weight
    # Values outside the mask may be infinite or NaN, and 0 * inf is not 0.
    counted = torch.where(weights != 0, per_token, torch.zeros_like(per_token))
    return (counted * weights).sum() / total
