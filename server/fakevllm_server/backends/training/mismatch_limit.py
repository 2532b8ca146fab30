"""Limit of the mismatch between the log-probabilities of engine and trainer. A step above the limit
makes no update.

Engine and trainer should compute the same log-probabilities, except for rounding. The metric
`mismatch_k3` measures the difference. In healthy runs the metric is below 0.01. In runs that are
about to collapse, the metric grows by orders of magnitude. Above the job's limit, the samples
differ too much from the trainer's policy. The gradient is then wrong, even with a correction for
small differences.
"""

from __future__ import annotations

from collections.abc import Mapping

from fakevllm_adapters.job.model import TrainJob

NO_UPDATE = {"skipped": 1.0, "no_update": 1.0}
"""Metrics of a step that ended before its first update."""
TOO_FAR = {**NO_UPDATE, "too_far": 1.0}
"""Additional metrics of a step that made no update because its mismatch was above the limit."""


def is_too_far(metrics: Mapping[str, float], job: TrainJob) -> bool:
    """Return True if the mismatch between engine and trainer is above the job's limit. The mismatch
    is measured before the step's first update. A mismatch of NaN counts as above the limit.

    >>> is_too_far({"mismatch_k3": 3.0}, TrainJob()), is_too_far({}, TrainJob())
    (True, False)
    """
    if job.max_mismatch_k3 is None:
        return False
    return not metrics.get("mismatch_k3", 0.0) <= job.max_mismatch_k3
