"""The results of one training run on held-out rows, for the page Learning. This module does no
I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fakevllm.console.sources.evaluation_results import EvaluationResult, VersionResult
from fakevllm.statistics.confidence_sequence import Interval


@dataclass(frozen=True, slots=True)
class HeldOutResult:
    """The result of one version of the weights in one evaluation."""

    evaluation: EvaluationResult
    version: VersionResult
    step: int | None
    """Training step that made the version; 0 for the weights before training. None if the step is
    unknown."""

    @property
    def mark(self) -> dict[str, float] | None:
        """The mark in the chart, as a dict for JSON. None if the step or the mean reward is
        unknown."""
        mean = self.version.summary.mean
        # Statistics of huge rewards may be infinite, which no chart and no JSON can show.
        if self.step is None or mean is None or not _is_finite(mean):
            return None
        return {"step": self.step, "mean": mean.mean, "low": mean.low, "high": mean.high}


def held_out_results(
    evaluations: Iterable[EvaluationResult],
    run_id: str,
    steps: Mapping[int, int],
    *,
    is_only_run: bool,
) -> Iterator[HeldOutResult]:
    """Yield the results of the versions of one run, in the order of `evaluations`. `steps` has the
    training step that made each version. Rows that do not name their run count if the ledger has
    only this run (`is_only_run`)."""
    own = {run_id, None} if is_only_run else {run_id}
    for evaluation in evaluations:
        if evaluation.run_ids <= own:
            for version in evaluation.versions:
                yield HeldOutResult(evaluation, version, _step(version.newest, steps))


def _is_finite(interval: Interval) -> bool:
    return all(map(math.isfinite, (interval.low, interval.mean, interval.high)))


def _step(version: int | None, steps: Mapping[int, int]) -> int | None:
    """Return the step that made a version. No step made version 0, the model before training."""
    if version is None:
        return None
    return 0 if version == 0 else steps.get(version)
