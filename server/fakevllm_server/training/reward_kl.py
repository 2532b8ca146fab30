"""KL in the reward: what a trainer is asked before a step can be planned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.algorithms.shaping import kl_penalties
from fakevllm_server.training.batch import trainable_calls
from fakevllm_server.types.backend import Trainer
from fakevllm_server.types.calls import FinishedGroup


async def reward_penalties(
    trainer: Trainer, groups: Sequence[FinishedGroup], job: TrainJob
) -> list[list[float]] | None:
    """For each trained token of each of `trainable_calls`; None where the job takes nothing from
    rewards, or trains nothing. Raises what the trainer raises."""
    if not job.use_kl_in_reward or job.control == "frozen":
        return None
    calls = trainable_calls(groups, job)
    old = [list(compress(call.logprobs, call.is_trained)) for call in calls]
    if not job.bypass_mode:
        old = await trainer.log_probs(calls, "trained")
    reference = await trainer.log_probs(calls, "reference")
    return [kl_penalties(*pair, job.kl_coef) for pair in zip(old, reference, strict=True)]
