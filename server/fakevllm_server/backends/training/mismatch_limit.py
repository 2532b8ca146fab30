"""When a trainer makes no update: what it would train on was not sampled by the weights it has.

Engine and trainer compute the same log-probabilities but for rounding; healthy runs show a k3 below
0.01, and ones about to collapse climb by orders of magnitude. Above the job's limit a gradient is
that of something else, whatever corrects for small differences.
"""

from __future__ import annotations

from collections.abc import Mapping

from fakevllm_adapters.job.model import TrainJob

NO_UPDATE = {"skipped": 1.0, "no_update": 1.0}
"""What a step tells that ended before its first update."""
TOO_FAR = {**NO_UPDATE, "too_far": 1.0}
"""What such a step tells beside what it measured."""


def is_too_far(metrics: Mapping[str, float], job: TrainJob) -> bool:
    """Asked before a step's first update. What is no number is too far as well.

    >>> is_too_far({"mismatch_k3": 3.0}, TrainJob()), is_too_far({}, TrainJob())
    (True, False)
    """
    if job.max_mismatch_k3 is None:
        return False
    return not metrics.get("mismatch_k3", 0.0) <= job.max_mismatch_k3
