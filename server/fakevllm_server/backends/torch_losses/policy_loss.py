"""What policy losses give, and the arithmetic they share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Keeps exp finite when a stale call's tokens have become impossible; verl's value."""


class PolicyLoss(NamedTuple):
    """[tokens] each."""

    per_token: Tensor
    clipped: Tensor
    """1 where the clip decided, so that the token has no gradient."""
    clipped_lower: Tensor
    """1 where a bound for negative advantages decided."""


def unclipped(per_token: Tensor) -> PolicyLoss:
    """Of a loss that has no clip."""
    return PolicyLoss(per_token, torch.zeros_like(per_token), torch.zeros_like(per_token))


def ratio_of(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """r = π / π_old, of each token."""
    return torch.exp(torch.clamp(log_prob - old_log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def unit_sum(values: Tensor, units: Tensor) -> Tensor:
    """For each token the sum over all tokens of its unit; `units` numbers them from 0."""
    return _sums(values, units)[units]


def unit_mean(values: Tensor, units: Tensor) -> Tensor:
    lengths = _sums(torch.ones_like(values), units).clamp(min=1)
    return (_sums(values, units) / lengths)[units]


def unit_max(values: Tensor, units: Tensor) -> Tensor:
    """No gradient."""
    lowest = values.new_full((_num(units),), float("-inf"))
    return lowest.scatter_reduce(0, units, values.detach(), "amax")[units]


def _sums(values: Tensor, units: Tensor) -> Tensor:
    return values.new_zeros(_num(units)).index_add(0, units, values)


def _num(units: Tensor) -> int:
    """Room for every unit. As many as tokens are enough, and asking for more would be a sync."""
    return units.numel()
