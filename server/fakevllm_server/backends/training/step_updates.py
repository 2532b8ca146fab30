"""The updates of one training step, and the step's metrics from the metrics of its updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fakevllm_server.backends.training.mismatch_limit import NO_UPDATE
from fakevllm_server.types.backend import StepMetrics

TOKEN_MEANS = frozenset(
    {"clip_fraction", "clip_fraction_lower", "kl", "rollout_is_weight", "rollout_rs_rejected"}
)
"""Metrics of an update that are means over the tokens of its mini-batch. The mean over several
mini-batches weights each of them by its share of the step's tokens. All other metrics of updates
are averaged without weights."""
UPDATES_MADE = "updates_made"
"""Metric: the number of updates that a step has made."""
NONE_MADE = {"skipped": 0.0, UPDATES_MADE: 0.0}
"""Metrics of a step before its first update."""


class StepUpdates:
    """The updates that a training step has made so far, with the metrics of each."""

    def __init__(self, measured: StepMetrics | None = None) -> None:
        """Create the record of a step without updates. `measured` has the metrics of the whole
        step before its first update, or is None if the first update measures them."""
        self._measured = measured
        self._metrics: list[StepMetrics] = []
        self._shares: list[float] = []
        self.num_made = 0
        """Number of updates that were made."""

    @property
    def next_measures(self) -> bool:
        """Whether the next update is the step's first, and measures what is compared before it."""
        return self._measured is None and not self._metrics

    def begin(self, metrics: StepMetrics, share: float) -> None:
        """Record the metrics of an update that may follow. The caller may add further metrics to
        this dictionary later. `share` is the mini-batch's share of the step's tokens."""
        self._metrics.append(metrics)
        self._shares.append(share)

    def made(self) -> None:
        """Record that the update has been made."""
        self.num_made += 1

    @property
    def metrics(self) -> StepMetrics:
        """The metrics of the step."""
        means = mean_of_updates(self._metrics, self._shares)
        return {**(self._measured or {}), **means, UPDATES_MADE: float(self.num_made)}

    @property
    def metrics_of_stopped_step(self) -> StepMetrics:
        """The metrics of a step that makes no further update, because a value is not finite."""
        if self.num_made == 0:
            return self.metrics | NO_UPDATE
        return self.metrics | {"skipped": 1.0}


def mean_of_updates(
    updates: Sequence[Mapping[str, float]], shares: Sequence[float]
) -> dict[str, float]:
    """Return the mean of each metric over the updates in which the metric was measured. `shares`
    has the share of the step's tokens that each update trains. TOKEN_MEANS are weighted by it.

    Metrics that compare the trainer with the policy that sampled the calls are measured only once,
    before any update.

    >>> mean_of_updates([{"loss": 1.0, "ess": 0.9}, {"loss": 2.0}], [1.0, 1.0])
    {'loss': 1.5, 'ess': 0.9}
    >>> mean_of_updates([{"loss": 1.0, "kl": 1.0}, {"loss": 2.0, "kl": 2.0}], [0.75, 0.25])
    {'loss': 1.5, 'kl': 1.25}
    """
    names = dict.fromkeys(name for metrics in updates for name in metrics)
    return {name: _mean(name, updates, shares) for name in names}


def _mean(name: str, updates: Sequence[Mapping[str, float]], shares: Sequence[float]) -> float:
    pairs = [(one[name], share) for one, share in zip(updates, shares, strict=True) if name in one]
    total = sum(share for _, share in pairs)
    if name not in TOKEN_MEANS or total == 0:
        return sum(value for value, _ in pairs) / len(pairs)
    return sum(value * share for value, share in pairs) / total
