"""Weigh the calls of logged groups in a training step. A logged group is a request with its
answers, which an earlier run has sampled.

The trainer computes the log-probabilities of the logged tokens under its current weights. Each
token's advantage is multiplied by the token's truncated importance weight. The loss then uses the
computed log-probabilities as those of the old policy, instead of the recorded log-probabilities.
The policy loss therefore begins with the ratio 1, as for tokens that the current weights have
sampled. With the weight w and the ratio ρ, the loss of a token is w · min(ρ A, clip(ρ) A), as in
decoupled PPO (J. Hilton et al., "Batch size-invariance for policy optimization", 2022). Every
trainer can compute this loss, because a trainer gets the advantages and the log-probabilities as
inputs of the step.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.algorithms.importance_weights import WeightSums, truncated_weights
from fakevllm_server.types.backend import Batch, Call, StepMetrics, Trainer
from fakevllm_server.types.calls import LOGGED_VERSION
from fakevllm_server.types.number_arrays import FloatArray, float_array


@dataclass(frozen=True, slots=True)
class WeighedBatch:
    """A batch in which the advantages of the logged calls are multiplied by importance weights."""

    batch: Batch
    metrics: StepMetrics
    """`logged_tokens`, `logged_weight` (mean weight), `logged_truncated` (share of weights at the
    bound) and `logged_ess` (effective sample size as a share of the tokens). Empty if the batch has
    no logged tokens."""

    def is_below(self, job: TrainJob) -> bool:
        """Return True if the effective sample size is below the job's limit."""
        return self.metrics.get("logged_ess", 1.0) < job.min_logged_ess


async def weigh_logged_calls(trainer: Trainer, batch: Batch, job: TrainJob) -> WeighedBatch:
    """Multiply the advantages of the batch's logged calls by importance weights, and return the
    result. An earlier run has sampled the logged calls. Other calls stay unchanged. Errors of the
    trainer are raised unchanged. Raises ValueError if a log-probability is NaN."""
    logged = [call for call in batch.calls if call.version == LOGGED_VERSION]
    if not sum(call.num_trained for call in logged):
        return WeighedBatch(batch, {})
    current = await trainer.log_probs(logged, "trained")
    # In a worker thread, because a large step takes seconds.
    return await asyncio.to_thread(_weigh, batch, logged, current, job.logged_weight_bound)


def _weigh(
    batch: Batch, logged: Sequence[Call], current: Sequence[Sequence[float]], bound: float
) -> WeighedBatch:
    weights: list[FloatArray] = []
    calls: list[Call] = []
    rows = iter(zip(logged, current, strict=True))
    for call in batch.calls:
        if call.version == LOGGED_VERSION:
            call, log_probs = next(rows)
            weights.append(truncated_weights(log_probs, call.logprobs, bound))
            pairs = zip(call.advantages, weights[-1], strict=True)
            advantage = float_array(value * weight for value, weight in pairs)
            old = float_array(
                now if math.isfinite(now) else then
                for now, then in zip(log_probs, call.logprobs, strict=True)
            )  # a token with probability 0 has the weight 0, and the loss must not be NaN
            call = replace(call, logprobs=old, advantage=advantage)
        calls.append(call)
    sums = WeightSums.of(weights, bound)
    metrics = {
        "logged_tokens": float(sums.num),
        "logged_weight": sums.mean,
        "logged_truncated": sums.num_truncated / sums.num,
        "logged_ess": sums.ess,
    }
    return WeighedBatch(replace(batch, calls=calls), metrics)
