"""The limit of the mismatch between the log-probabilities of rollout engine and trainer. A step
above the limit makes no update.

Except for rounding, engine and trainer should compute the same log-probabilities. The metric
`mismatch_k3` measures the difference. The metric is below 0.01 in healthy runs, and grows by orders
of magnitude in runs that are about to collapse. Above the limit, the samples differ so much from
the trainer's policy that the gradient is wrong, even with importance weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from fakevllm_adapters.job.model import TrainJob

NO_UPDATE = {"skipped": 1.0, "no_update": 1.0}
"""Additional metrics of a step that makes no update."""
TOO_FAR = {**NO_UPDATE, "too_far": 1.0}
"""Additional metrics of a step that makes no update because its mismatch is above the limit."""


def is_too_far(metrics: Mapping[str, float], job: TrainJob) -> bool:
    """Return True if a training step's mismatch between rollout engine and trainer is above the
    job's limit. The mismatch is the difference of their log-probabilities before the step's first
    update. NaN counts as above the limit. If the job has no limit or the mismatch was not measured,
    return False.

    >>> is_too_far({"mismatch_k3": 3.0}, TrainJob()), is_too_far({}, TrainJob())
    (True, False)
    """
    if job.max_mismatch_k3 is None:
        return False
    return not metrics.get("mismatch_k3", 0.0) <= job.max_mismatch_k3
