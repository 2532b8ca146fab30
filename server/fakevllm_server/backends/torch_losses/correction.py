"""Where trainer and engine do not see the same probability: weights, and what is left out.

Both read log_ratio = trainer's log-probability - engine's, and neither has a gradient. Sequences
are units of the loss. Formulas and names are verl's (`rollout_correction`); truncated importance
sampling: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training"
(2025); weights of 0 outside both bounds: IcePop.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fakevllm_adapters.job.loss_spec import Bounds, LossSpec
from fakevllm_server.backends.torch_losses.policy_loss import (
    MAX_LOG_RATIO,
    unit_max,
    unit_mean,
    unit_sum,
)

LEAST_MEAN = 1e-8
"""verl's value: a mean that is not above it is none to divide by."""


def importance_weights(log_ratio: Tensor, units: Tensor, spec: LossSpec) -> Tensor:
    """[tokens]: min(exp(log_ratio), high), or exp of its sum over the sequence; all 1 where
    `rollout_is` is not set."""
    log_ratio = log_ratio.detach()
    if spec.rollout_is is None:
        return torch.ones_like(log_ratio)
    if spec.rollout_is == "sequence":
        log_ratio = unit_sum(log_ratio, units)
    ratio = torch.exp(torch.clamp(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    bounds = spec.rollout_is_bounds
    if bounds.low is None:
        return torch.clamp(ratio, max=bounds.high)
    is_inside = (ratio >= bounds.low) & (ratio <= bounds.high)
    return torch.where(is_inside, ratio, torch.zeros_like(ratio))


def mean_weight(weights: Tensor, units: Tensor, token_share: Tensor, spec: LossSpec) -> Tensor:
    """A scalar: what `rollout_is_batch_normalize` divides by. The mean over the step's tokens, or
    over its sequences, each of which has one weight; 1 where all weights are 0.

    All tokens of the step that count, [tokens] each.
    """
    if spec.rollout_is == "sequence":
        of_unit = 1 / unit_sum(torch.ones_like(weights), units)
        mean = (weights * of_unit).sum() / of_unit.sum()
    else:
        mean = (weights * token_share).sum()
    return torch.where(mean > LEAST_MEAN, mean, torch.ones_like(mean))


def is_kept(log_ratio: Tensor, units: Tensor, spec: LossSpec) -> Tensor:
    """[tokens] of bool: what passes all of `rollout_rs`."""
    log_ratio = torch.clamp(log_ratio.detach(), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    kept = torch.ones_like(log_ratio, dtype=torch.bool)
    for name, bounds in spec.rejection_bounds.items():
        level, _, estimator = name.rpartition("_")
        kept &= _is_within(_LEVELS[level](_divergence(log_ratio, estimator), units), bounds)
    return kept


def _divergence(log_ratio: Tensor, estimator: str) -> Tensor:
    """Of the engine's policy from the trainer's, seen from the engine's samples."""
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio.square()
        case _:
            return torch.exp(log_ratio) - 1 - log_ratio


def _is_within(divergence: Tensor, bounds: Bounds) -> Tensor:
    """k1 is bounded as a ratio, from both sides; k2 and k3 by a number."""
    if bounds.low is None:
        return divergence <= bounds.high
    return (divergence >= math.log(bounds.low)) & (divergence <= math.log(bounds.high))


_LEVELS = {
    "token": lambda values, units: values,
    "seq_sum": unit_sum,
    "seq_mean": unit_mean,
    "seq_max": unit_max,
}
