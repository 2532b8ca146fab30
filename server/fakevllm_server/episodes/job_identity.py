"""Decide whether waiting groups and episodes belong to the job that is started. This module does no
I/O.

Groups and episodes that wait for a training step belong to the job for which they were collected.
Rewards of two jobs cannot be compared: two experiments may use the same task id for different
tasks, and two models answer differently. A job that only trains in another way, for example with
another learning rate or batch size, continues with what waits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

from fakevllm_adapters.job.model import TrainJob

DIGEST_CHARS = 16
"""Length of a job's digest in hex digits."""
OTHER_JOB = "other_job"
"""Reason of a group that was dropped because it was collected for another job."""


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The settings of a job to which waiting groups and episodes belong."""

    model: str | None
    experiment_name: str | None
    kl_in_reward: float | None
    """Coefficient of the KL in the reward; None if the reward includes no KL."""
    length_penalty: tuple[int | None, int, float] | None
    """Maximum length of an answer, length of the buffer at its end, and largest penalty; None if
    the job has no length penalty."""


def identity_of(job: TrainJob) -> JobIdentity:
    """Return the identity of a job."""
    penalty = None
    if job.overlong_buffer_len is not None:
        penalty = job.max_answer_length, job.overlong_buffer_len, job.overlong_penalty_factor
    return JobIdentity(
        job.model,
        job.experiment_name,
        job.kl_coef if job.use_kl_in_reward else None,
        penalty,
    )


def digest_of(job: TrainJob) -> str:
    """Return a digest of the identity of a job. Settings that are None do not change the digest, so
    that a setting of a newer version does not make an old job another one."""
    settings = {
        name: value for name, value in asdict(identity_of(job)).items() if value is not None
    }
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]


def changed_settings(previous: TrainJob, job: TrainJob) -> list[str]:
    """Return the names of the settings that make `job` another job than `previous`. The list is
    empty if both are the same job.

    >>> changed_settings(TrainJob(experiment_name="a"), TrainJob(experiment_name="b"))
    ['experiment_name']
    >>> changed_settings(TrainJob(lr=1e-5), TrainJob(lr=1e-6, batch_size=32))
    []
    """
    return list(_differences(identity_of(previous), identity_of(job)))


def _differences(one: JobIdentity, other: JobIdentity) -> Iterator[str]:
    for field in fields(JobIdentity):
        if getattr(one, field.name) != getattr(other, field.name):
            yield field.name
