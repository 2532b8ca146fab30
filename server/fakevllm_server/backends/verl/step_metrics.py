"""Metrics of a training step before its first update, computed from the workers'
log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fakevllm_server.backends.torch_losses.aggregate import token_mean
from fakevllm_server.backends.torch_losses.kl import k3
from fakevllm_server.backends.torch_losses.mismatch_metrics import Mismatch
from fakevllm_server.backends.verl.batch_split import token_weights, total_weight
from fakevllm_server.types.backend import Call, StepMetrics


def first_pass_metrics(
    rows: Sequence[Call],
    log_probs: Sequence[Tensor],
    entropies: Sequence[Tensor],
    version: int | None = None,
) -> StepMetrics:
    """Return the metrics of KL divergence, entropy and mismatch (between rollout engine and
    trainer) before the step's first update. The metrics have the same names as in the embedded
    trainer. `log_probs` and `entropies` have one tensor [response tokens] for each row.

    `version` is the version of the trainer's weights. The metrics of KL divergence and entropy are
    means over response tokens, in which the weight of a token is the loss weight of its call.
    """
    sampled = torch.cat([torch.tensor(list(row.logprobs), dtype=torch.float32) for row in rows])
    weights = token_weights(rows)
    current = torch.cat(list(log_probs))
    total = total_weight(rows)
    per_token = {
        "approx_kl": k3(sampled, current),
        "ppo_kl": sampled - current,
        "entropy": torch.cat(list(entropies)),
    }
    metrics = {name: token_mean(value, weights, total).item() for name, value in per_token.items()}
    is_trained = weights > 0
    is_equal_version = torch.cat(
        [torch.full((len(row.response_ids),), row.version == version) for row in rows]
    )
    mismatch = Mismatch.of(
        current[is_trained],
        sampled[is_trained],
        weights[is_trained] / (total or 1),
        is_equal_version[is_trained],
    )
    difference = (current.exp() - sampled.exp()).abs()[is_trained]
    largest = {"prob_diff_max": difference.max().item()} if len(difference) else {}
    return metrics | mismatch.metrics | largest
