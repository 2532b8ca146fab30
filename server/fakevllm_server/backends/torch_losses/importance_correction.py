"""Corrections for the difference between the trainer's and the rollout engine's log-probabilities:
importance weights, and the rejection of tokens.

Both corrections use `log_ratio`, which is the trainer's log-probability minus the engine's
log-probability of a token. No gradient flows through the corrections. Formulas and names are those
of verl's `rollout_correction`. In this file, "sequence" and "unit" mean the same: a group of tokens
that the loss treats as one sequence. The setting `loss_unit` decides what counts as one sequence,
such as a call or an episode.

There are two kinds of importance weights. Truncated weights have an upper bound (Yao et al., "Your
efficient RL framework secretly brings you off-policy RL training", 2025). Masked weights have two
bounds, and a ratio outside the bounds gives a weight of 0 (IcePop).
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
"""If the mean weight is at most this value, weights are not normalized, because the divisor would
be almost 0. The value is verl's."""


def importance_weights(log_ratio: Tensor, units: Tensor, spec: LossSpec) -> Tensor:
    """Return the importance weight of each token (shape [tokens]). All weights are 1 if
    `rollout_is` is not set.

    If `rollout_is` is `token`, the ratio of a token is exp(log_ratio). If `rollout_is` is
    `sequence`, the ratio is exp of the sum of log_ratio over the token's sequence. The setting
    `rollout_is_bounds` has the bounds. Without a lower bound, the weight is min(ratio, upper
    bound). With a lower bound, the weight is the ratio if the ratio is within the bounds, else 0.
    """
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
    """Return the mean importance weight of a step. If the mean is almost 0, return 1.

    If `rollout_is` is `sequence`, the mean is taken over the step's sequences, else over the step's
    tokens. With the setting `rollout_is_batch_normalize`, the caller divides all importance weights
    by the returned mean. Each tensor has shape [tokens], and must contain all tokens of the step
    that count in the loss.
    """
    if spec.rollout_is == "sequence":
        share_of_unit = 1 / unit_sum(torch.ones_like(weights), units)
        mean = (weights * share_of_unit).sum() / share_of_unit.sum()
    else:
        mean = (weights * token_share).sum()
    return torch.where(mean > LEAST_MEAN, mean, torch.ones_like(mean))


def is_kept(log_ratio: Tensor, units: Tensor, spec: LossSpec) -> Tensor:
    """Return a mask (bool, shape [tokens]). The mask is True for each token to keep: a token that
    passes all rejection criteria in the setting `rollout_rs`.

    A unit is one sequence in the loss. `units` (shape [tokens]) has the number of each token's
    unit.
    """
    log_ratio = torch.clamp(log_ratio.detach(), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    kept = torch.ones_like(log_ratio, dtype=torch.bool)
    for name, bounds in spec.rejection_bounds.items():
        level, _, estimator = name.rpartition("_")
        kept &= _is_within(_LEVELS[level](_divergence(log_ratio, estimator), units), bounds)
    return kept


def _divergence(log_ratio: Tensor, estimator: str) -> Tensor:
    """Return an estimate of KL(engine || trainer) for each token (shape [tokens]). The tokens were
    sampled by the engine. `estimator` is `k1`, `k2` or `k3`."""
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio.square()
        case _:
            return torch.exp(log_ratio) - 1 - log_ratio


def _is_within(divergence: Tensor, bounds: Bounds) -> Tensor:
    """Return a mask (bool, shape [tokens]) that is True where the divergence is within the bounds.
    For the estimator k1, there are two bounds. They are probability ratios, so the divergence is
    compared with their logarithms. For k2 and k3, there is only an upper bound, with which the
    divergence is compared directly."""
    if bounds.low is None:
        return divergence <= bounds.high
    return (divergence >= math.log(bounds.low)) & (divergence <= math.log(bounds.high))


_LEVELS = {
    "token": lambda values, units: values,
    "seq_sum": unit_sum,
    "seq_mean": unit_mean,
    "seq_max": unit_max,
}
