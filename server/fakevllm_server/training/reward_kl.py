"""KL in the reward: compute the penalties that are subtracted from the tokens' rewards. The trainer
computes the log-probabilities from which the penalties follow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import compress

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.algorithms.reward_penalties import kl_penalties
from fakevllm_server.training.step_plan import trainable_calls
from fakevllm_server.types.backend import Call, Trainer
from fakevllm_server.types.calls import LOGGED_VERSION, FinishedGroup
from fakevllm_server.types.number_arrays import FloatArray, float_array


async def reward_penalties(
    trainer: Trainer, groups: Sequence[FinishedGroup], job: TrainJob
) -> list[FloatArray] | None:
    """Return the KL penalties for the rewards of a step, with one array for each call that
    `trainable_calls` returns. An array has one penalty for each trained token of the call.

    Return None if the job has no KL in its reward. Also return None if the job's setting `control`
    is `frozen`, because nothing is trained then. Errors of the trainer are raised unchanged.
    """
    if not job.use_kl_in_reward or job.control == "frozen":
        return None
    # In worker threads, because a large step takes seconds.
    calls = await asyncio.to_thread(trainable_calls, groups, job)
    if job.bypass_mode:
        old = await asyncio.to_thread(_trained_logprobs, calls)
        # Other weights sampled the logged calls, so the policy before the step is the trainer's.
        at = [index for index, call in enumerate(calls) if call.version == LOGGED_VERSION]
        if at:
            logged = await trainer.log_probs([calls[index] for index in at], "trained")
            for index, row in zip(at, logged, strict=True):
                old[index] = float_array(row)
    else:
        old = [float_array(row) for row in await trainer.log_probs(calls, "trained")]
    reference = await trainer.log_probs(calls, "reference")
    return await asyncio.to_thread(_penalties, old, reference, job.kl_coef)


def _trained_logprobs(calls: Sequence[Call]) -> list[FloatArray]:
    """Return the log-probabilities of each call's trained tokens, as the engine reported them."""
    return [float_array(compress(call.logprobs, call.is_trained)) for call in calls]


def _penalties(
    old: Sequence[Sequence[float]], reference: Sequence[Sequence[float]], coef: float
) -> list[FloatArray]:
    return [
        float_array(kl_penalties(old_row, reference_row, coef))
        for old_row, reference_row in zip(old, reference, strict=True)
    ]
