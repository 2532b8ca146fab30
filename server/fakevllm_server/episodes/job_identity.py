"""Decide if waiting groups and episodes belong to the job that is started. This module does no I/O.

Groups and episodes that wait for a training step are trained only by the job for which they were
collected. The reason is that rewards of different jobs cannot be compared. Two experiments may use
the same task id for different tasks, and two models answer differently.

However, two jobs count as the same job if they differ only in how they train, for example in
learning rate or batch size.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from fakevllm_adapters.job.model import TrainJob

DIGEST_CHARS = 16
"""Length of a job's digest in hex digits."""
OTHER_JOB = "other_job"
"""Reason for dropping a group because it was collected for another job."""


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The settings that decide whether two jobs count as the same job. Waiting groups and episodes
    are trained only by the job for which they were collected."""

    model: str | None
    """Fingerprint of the model that the engine loads for the job. The job's own setting `model` is
    not used, because the server may override it, and because it can name a folder in several ways.
    """
    experiment_name: str | None
    """Experiment name of the job's run. If the job sets no name, this may be the name of the run
    that the job continues."""
    kl_in_reward: float | None
    """Coefficient of the KL in the reward; None if the reward includes no KL."""
    length_penalty: tuple[int | None, int, float] | None
    """The tuple (maximum length of an answer, length of the buffer below this maximum, largest
    penalty). None if the job has no length penalty."""

    def to_json(self) -> str:
        """Return the identity as JSON, without settings that are None. A newer version of fakevllm
        can then add a setting without changing the identity of older jobs."""
        settings = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(settings, sort_keys=True)

    @property
    def digest(self) -> str:
        """Digest of the settings that identify the job. The run log and the proxy's ledger (its
        database) store the digest."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:DIGEST_CHARS]


def identity_of(job: TrainJob, model: str | None, experiment_name: str | None) -> JobIdentity:
    """Return the identity of a job.

    `model` is the fingerprint of the model that the engine loads for the job. `experiment_name` is
    the experiment name of the job's run.
    """
    penalty = None
    if job.overlong_buffer_len is not None:
        penalty = job.max_answer_length, job.overlong_buffer_len, job.overlong_penalty_factor
    kl = job.kl_coef if job.use_kl_in_reward else None
    return JobIdentity(model, experiment_name, kl, penalty)


def parse_identity(text: str) -> JobIdentity:
    """Return the identity from the JSON text of `JobIdentity.to_json`. Raises ValueError if the
    text is malformed."""
    settings = json.loads(text)
    if not isinstance(settings, dict):
        raise ValueError("the identity of the job is no JSON object")
    known = cast("dict[str, Any]", settings)
    penalty = known.get("length_penalty")
    return JobIdentity(
        known.get("model"),
        known.get("experiment_name"),
        known.get("kl_in_reward"),
        None if penalty is None else tuple(penalty),
    )


def changed_settings(previous: JobIdentity, current: JobIdentity) -> list[str]:
    """Return the names of the settings that differ and that make `current` another job than
    `previous`. If `current` counts as the same job as `previous`, the list is empty.

    >>> before = identity_of(TrainJob(lr=1e-5), "m", "a")
    >>> changed_settings(before, identity_of(TrainJob(lr=1e-6, batch_size=32), "m", "a"))
    []
    >>> changed_settings(before, identity_of(TrainJob(), "m", "b"))
    ['experiment_name']
    """
    return [
        field.name
        for field in fields(JobIdentity)
        if getattr(previous, field.name) != getattr(current, field.name)
    ]
