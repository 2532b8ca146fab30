"""Checks of a whole training job before a run starts. This module does no I/O."""

from __future__ import annotations

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_adapters.job.model import TrainJob

LENGTH_SETTINGS = (
    "max_prompt_length",
    "max_response_length",
    "max_response_length_in_one_turn",
    "max_model_len",
)
GROUP_COUNTING_METHODS = (
    "rollout_until_finish_enough_tasks",
    "rollout_until_finish_enough_non_dummy_tasks",
)
"""Sample-collection methods whose steps take `batch_size` groups and leave the others. The other
methods take everything that was collected, so nothing can be collected ahead."""
LEAST_LORA_LR = 1e-5
"""A LoRA job with this learning rate or a lower one is refused. Adapters start at zero and need far
larger steps than full weights. At such a low rate, they would stay near zero."""


def check_job(job: TrainJob) -> TrainJob:
    """Check a training job, and return the job unchanged.

    Raises ValueError for settings that contradict each other or cannot work. The message is one
    line and says how to correct the job.
    """
    _check_backbone(job)
    _check_lengths(job)
    _check_gpus(job)
    _check_workers(job)
    _check_lora(job)
    _check_async_steps(job)
    LossSpec.of(job)
    return job


def _check_backbone(job: TrainJob) -> None:
    if job.backbone == "trinity":
        raise ValueError("backbone trinity is not supported: take it out, or name verl")


def _check_lengths(job: TrainJob) -> None:
    lengths = {name: getattr(job, name) for name in LENGTH_SETTINGS}
    missing = [name for name, value in lengths.items() if value is None]
    if len(missing) == len(LENGTH_SETTINGS) or _is_for_overlong(job, missing):
        return
    if missing:
        raise ValueError(
            f"{', '.join(LENGTH_SETTINGS)} go together: "
            f"set {', '.join(missing)} too, or none of them"
        )
    prompt, response, turn, whole = (int(value) for value in lengths.values())
    if prompt + response > whole:
        raise ValueError(
            f"max_prompt_length {prompt} and max_response_length {response} are more than "
            f"max_model_len {whole}: raise that to {prompt + response}, or lower them"
        )
    if turn > response:
        raise ValueError(
            f"max_response_length_in_one_turn {turn} is more than max_response_length {response}: "
            f"lower it to {response} or less"
        )


def _is_for_overlong(job: TrainJob, missing: list[str]) -> bool:
    """Return True if the job sets max_response_length only for the penalty on long answers. The
    setting then limits no answer. It is only the answer length at which the penalty equals
    overlong_penalty_factor.

    `missing` are the length settings that the job does not set.
    """
    alone = len(missing) == len(LENGTH_SETTINGS) - 1 and job.max_response_length is not None
    return alone and job.overlong_buffer_len is not None


def _check_gpus(job: TrainJob) -> None:
    if job.n_gpu is None:
        return
    num_episodes = job.batch_size * job.num_repeat
    if num_episodes % job.n_gpu:
        raise ValueError(
            f"batch_size {job.batch_size} times num_repeat {job.num_repeat} is {num_episodes} "
            f"episodes a step, which n_gpu {job.n_gpu} does not divide: change one of them"
        )
    split = job.tensor_model_parallel_size or 1
    if job.n_gpu % split:
        raise ValueError(
            f"tensor_model_parallel_size {split} does not divide n_gpu {job.n_gpu}: lower it, or "
            "set n_gpu to a multiple of it"
        )


def _check_workers(job: TrainJob) -> None:
    workers = job.max_env_worker
    if workers is not None and workers < job.num_repeat:
        raise ValueError(
            f"max_env_worker {workers} is less than num_repeat {job.num_repeat}: the episodes of "
            f"one task could not run at the same time, so raise it to {job.num_repeat} or more"
        )


def _check_async_steps(job: TrainJob) -> None:
    num, method = job.async_steps, job.swarm_mode_sample_collection_method
    if not num:
        return
    if num > job.max_staleness:
        raise ValueError(
            f"async_steps {num} is more than max_staleness {job.max_staleness}: groups that are "
            f"collected {num} steps ahead would be dropped for their age, so raise max_staleness "
            f"to {num}, or lower async_steps"
        )
    if job.lockstep:
        raise ValueError(
            f"async_steps {num} and lockstep contradict each other, because groups beside a step "
            "come in another order in each run: take one of them out"
        )
    if method not in GROUP_COUNTING_METHODS:
        raise ValueError(
            f"async_steps {num} needs steps of batch_size groups, and {method} trains everything "
            f"that was collected: set swarm_mode_sample_collection_method to "
            f"{GROUP_COUNTING_METHODS[0]}, or take async_steps out"
        )


def _check_lora(job: TrainJob) -> None:
    if job.lora_rank > 0 and job.lr <= LEAST_LORA_LR:
        raise ValueError(
            f"lr {job.lr:g} is too small for adapters (lora_rank {job.lora_rank}): set lr above "
            f"{LEAST_LORA_LR:g}, such as 3e-5"
        )
