"""Limit of the mismatch between engine and trainer above which a step makes no update.

Engine and trainer compute the same log-probabilities, except for rounding. Healthy runs have a
`mismatch_k3` below 0.01; in runs that are about to collapse it grows by orders of magnitude. Above
the job's limit the samples are not from the trainer's weights, so the gradient is not the policy's,
even with a correction for small differences.
"""

from __future__ import annotations

from collections.abc import Mapping

from fakevllm_adapters.job.model import TrainJob

NO_UPDATE = {"skipped": 1.0, "no_update": 1.0}
"""Metrics of a step that ended before its first update."""
TOO_FAR = {**NO_UPDATE, "too_far": 1.0}
"""Metrics that a step above the limit adds to those it measured."""


def is_too_far(metrics: Mapping[str, float], job: TrainJob) -> bool:
    """Return whether a step's mismatch, measured before its first update, is above the job's limit.
    NaN counts as above.

    >>> is_too_far({"mismatch_k3": 3.0}, TrainJob()), is_too_far({}, TrainJob())
    (True, False)
    """
    if job.max_mismatch_k3 is None:
        return False
    return not metrics.get("mismatch_k3", 0.0) <= job.max_mismatch_k3
