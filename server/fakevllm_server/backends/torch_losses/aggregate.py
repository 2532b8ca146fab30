"""Aggregate the losses of tokens to one number."""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(
    per_token: Tensor, weights: Tensor, total_weight: Tensor | float | None = None
) -> Tensor:
    """Return the weighted mean over tokens. `per_token` and `weights` have one shape, and `weights`
    is 0 outside the mask.

    If `total_weight` is the weight of the whole batch, the results of its micro-batches add up to
    the result of the batch, however the batch was cut.
    """
    total = weights.sum() if total_weight is None else total_weight
    # Values outside the mask may be infinite or NaN, and 0 * inf is not 0.
    counted = torch.where(weights != 0, per_token, torch.zeros_like(per_token))
    return (counted * weights).sum() / total
