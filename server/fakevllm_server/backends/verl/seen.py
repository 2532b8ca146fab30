"""What a step shows of the policy before its first update, from the workers' own numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fakevllm_server.backends.torch_losses.aggregate import token_mean
from fakevllm_server.backends.torch_losses.kl import k3
from fakevllm_server.backends.torch_losses.mismatch import Mismatch
from fakevllm_server.backends.verl.shares import token_weights, total_weight
from fakevllm_server.types.backend import Call, StepMetrics


def seen(
    rows: Sequence[Call],
    log_probs: Sequence[Tensor],
    entropies: Sequence[Tensor],
    version: int | None = None,
) -> StepMetrics:
    """Means over response tokens by their calls' weights, as the embedded trainer's. `log_probs`
    and `entropies`: of each row's response tokens; `version`: of the weights they are of."""
    sampled = torch.cat([torch.tensor(list(row.logprobs), dtype=torch.float32) for row in rows])
    weights = token_weights(rows)
    now = torch.cat(list(log_probs))
    total = total_weight(rows)
    per_token = {
        "approx_kl": k3(sampled, now),
        "entropy": torch.cat(list(entropies)),
    }
    metrics = {name: token_mean(value, weights, total).item() for name, value in per_token.items()}
    trained = weights > 0
    is_equal = torch.cat(
        [torch.full((len(row.response_ids),), row.version == version) for row in rows]
    )
    mismatch = Mismatch.of(
        now[trained], sampled[trained], weights[trained] / (total or 1), is_equal[trained]
    )
    difference = (now.exp() - sampled.exp()).abs()[trained]
    largest = {"prob_diff_max": difference.max().item()} if len(difference) else {}
    return metrics | mismatch.metrics | largest
