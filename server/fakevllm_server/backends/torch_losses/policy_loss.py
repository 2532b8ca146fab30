"""The result of a policy loss, and the arithmetic that the losses share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of the absolute value of a log-ratio, so that exp stays finite. A token that was sampled
with old weights may be almost impossible under the current weights. The value is verl's."""


class PolicyLoss(NamedTuple):
    """The loss of each token, and marks for clipped tokens. Each tensor has shape [tokens]."""

    per_token: Tensor
    clipped: Tensor
    """1 for a token that counts as clipped, else 0. In some losses, a clipped token has no
    gradient."""
    clipped_lower: Tensor
    """1 for a token with a negative advantage at which the loss applies its bound for negative
    advantages, else 0."""


def unclipped(per_token: Tensor) -> PolicyLoss:
    """Return a PolicyLoss with the given loss of each token. No token is marked as clipped."""
    return PolicyLoss(per_token, torch.zeros_like(per_token), torch.zeros_like(per_token))


def ratio_of(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Return the importance ratio π / π_old of each token (shape [tokens])."""
    return torch.exp(torch.clamp(log_prob - old_log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def unit_sum(values: Tensor, units: Tensor) -> Tensor:
    """Return for each token the sum of `values` over all tokens of its unit (one sequence in the
    loss). The shape is [tokens]. `units` has the unit number of each token, counted from 0."""
    return _sums(values, units)[units]


def unit_mean(values: Tensor, units: Tensor) -> Tensor:
    """Return for each token the mean of `values` over all tokens of its unit (one sequence in the
    loss). The shape is [tokens]. `units` has the unit number of each token, counted from 0."""
    lengths = _sums(torch.ones_like(values), units).clamp(min=1)
    return (_sums(values, units) / lengths)[units]


def unit_max(values: Tensor, units: Tensor) -> Tensor:
    """Return for each token the maximum of `values` over all tokens of its unit (one sequence in
    the loss), without a gradient. The shape is [tokens]. `units` has the unit number of each token,
    counted from 0."""
    lowest = values.new_full((_num(units),), float("-inf"))
    return lowest.scatter_reduce(0, units, values.detach(), "amax")[units]


def _sums(values: Tensor, units: Tensor) -> Tensor:
    return values.new_zeros(_num(units)).index_add(0, units, values)


def _num(units: Tensor) -> int:
    """Return the number of tokens as an upper bound on the number of units (the sequences in the
    loss). Computing the exact number would require a device synchronization."""
    return units.numel()
