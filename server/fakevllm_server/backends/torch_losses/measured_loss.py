"""The loss of some tokens of a training step, together with what these tokens contribute to the
step's metrics.

All trainers compute their metrics with this module, so the same batch gives the same metrics on
each of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from fakevllm_server.backends.torch_losses.kl import k3
from fakevllm_server.backends.torch_losses.mismatch_metrics import Mismatch
from fakevllm_server.backends.torch_losses.step_loss import step_loss, token_means
from fakevllm_server.backends.torch_losses.trained_tokens import TrainedTokens
from fakevllm_server.types.backend import LossSpec, StepMetrics

PROB_DIFF_MAX = "prob_diff_max"
"""Metric: the largest difference between the rollout engine's and the trainer's probability of a
token."""


class PartMetrics(NamedTuple):
    """The part of a training step's metrics that some of the step's tokens contribute."""

    metrics: StepMetrics
    """Contributions of the tokens to the means over the whole step. The metric PROB_DIFF_MAX is not
    a mean but the maximum over the tokens."""
    mismatch: Mismatch | None

    def scaled(self, share: float) -> PartMetrics:
        """Return the part that the tokens of a mini-batch contribute to the metrics of the step.
        These metrics are parts of means over the mini-batch, whose share of the step's tokens is
        `share`."""
        metrics = {
            name: value if name == PROB_DIFF_MAX else share * value
            for name, value in self.metrics.items()
        }
        return PartMetrics(metrics, None if self.mismatch is None else self.mismatch.scaled(share))


class MeasuredLoss(NamedTuple):
    loss: Tensor
    """Scalar: the tokens' part of the step's loss."""
    metrics: PartMetrics


def needs_entropy(spec: LossSpec, *, is_first: bool) -> bool:
    """Return True if an update of a step needs the entropy of each token, for the loss or for the
    metrics. `is_first` is true for the step's first update, if it measures what is compared before
    it."""
    return spec.has_policy_loss and (is_first or spec.entropy_coeff != 0)


def measured_loss(
    log_prob: Tensor,
    entropy: Tensor | None,
    tokens: TrainedTokens,
    is_equal_version: Tensor,
    spec: LossSpec,
    *,
    is_first: bool,
) -> MeasuredLoss:
    """Return the loss of some tokens of a step, and what these tokens contribute to the step's
    metrics.

    `log_prob` and `entropy` have a value for each token of `tokens` (shape [tokens]), computed with
    the current weights. `is_equal_version` is True for tokens of calls that were sampled entirely
    with the current weights. `is_first` is true for the step's first update, if it measures what
    is compared before it. Its metrics then include the differences between the trainer's and the
    rollout engine's log-probabilities. These differences are left out if `entropy` is None.
    """
    loss, parts = step_loss(log_prob, tokens, spec, entropy if spec.entropy_coeff != 0 else None)
    metrics = {name: value.item() for name, value in parts.items()}
    metrics["loss"] = loss.item()
    if not is_first or entropy is None:
        return MeasuredLoss(loss, PartMetrics(metrics, None))
    log_prob = log_prob.detach()
    return MeasuredLoss(
        loss,
        PartMetrics(
            metrics | _engine_differences(log_prob, entropy.detach(), tokens),
            _mismatch(log_prob, tokens, is_equal_version),
        ),
    )


def _engine_differences(log_prob: Tensor, entropy: Tensor, tokens: TrainedTokens) -> StepMetrics:
    """Return metrics that compare the trainer's log-probabilities with the rollout engine's, and
    the metric `entropy`.

    `approx_kl`, `ppo_kl` and `entropy` are means over all tokens of the step. Only the contribution
    of `tokens` to each mean is returned. The caller adds up the contributions. `prob_diff_max` is
    the largest difference between trainer and engine in the probability of a token in `tokens`.
    """
    sampled = tokens.sampled_log_prob
    means = {
        "approx_kl": k3(sampled, log_prob),
        "ppo_kl": sampled - log_prob,
        "entropy": entropy,
    }
    difference = (log_prob.exp() - sampled.exp()).abs()[tokens.counted]
    metrics = {name: value.item() for name, value in token_means(means, tokens).items()}
    return metrics | ({PROB_DIFF_MAX: difference.max().item()} if difference.numel() else {})


def _mismatch(log_prob: Tensor, tokens: TrainedTokens, is_equal_version: Tensor) -> Mismatch:
    counted = tokens.counted
    return Mismatch.of(
        log_prob[counted],
        tokens.sampled_log_prob[counted],
        tokens.token_share[counted],
        is_equal_version[counted],
    )


def joined_metrics(parts: Iterable[PartMetrics]) -> StepMetrics:
    """Combine the metrics of all parts of a step into the metrics of the whole step. The parts'
    contributions to a mean are added up. For PROB_DIFF_MAX, the largest value is taken."""
    columns: dict[str, list[float]] = defaultdict(list)
    mismatches: list[Mismatch] = []
    for metrics, mismatch in parts:
        if mismatch is not None:
            mismatches.append(mismatch)
        for name, value in metrics.items():
            columns[name].append(value)
    metrics_of_step = {
        name: _largest(values) if name == PROB_DIFF_MAX else sum(values)
        for name, values in columns.items()
    }
    return metrics_of_step | Mismatch.joined(mismatches).metrics


def _largest(values: Sequence[float]) -> float:
    """Return the largest value, or NaN if any value is NaN. Python's `max` might ignore a NaN."""
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)
