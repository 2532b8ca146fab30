"""From a loss per token to one number."""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(
    per_token: Tensor, weights: Tensor, total_weight: Tensor | float | None = None
) -> Tensor:
    """Weighted mean over tokens; `weights` is 0 outside the mask. All [rows, tokens].

    With `total_weight` of the whole batch, the results of its micro-batches add up to that of the
    batch, however it was cut.
    """
    total = weights.sum() if total_weight is None else total_weight
    # Where nothing counts the values may be anything, and 0 * inf is not 0.
    counted = torch.where(weights != 0, per_token, torch.zeros_like(per_token))
    return (counted * weights).sum() / total
