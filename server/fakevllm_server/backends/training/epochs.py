"""Combine the metrics of a step's epochs (passes over the batch) into the metrics of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def mean_of_epochs(epochs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the epochs in which the metric was measured. Metrics that
    compare the trainer with the policy that sampled the calls are measured only in the first epoch,
    before any update.

    >>> mean_of_epochs([{"loss": 1.0, "ess": 0.9}, {"loss": 2.0}])
    {'loss': 1.5, 'ess': 0.9}
    """
    names = dict.fromkeys(name for metrics in epochs for name in metrics)
    columns = {name: [metrics[name] for metrics in epochs if name in metrics] for name in names}
    return {name: sum(values) / len(values) for name, values in columns.items()}
