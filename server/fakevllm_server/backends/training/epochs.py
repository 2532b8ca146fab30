"""A step's numbers from those of its passes over the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def mean_of_epochs(epochs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Over the epochs that measured a name: what is about the policy that sampled is measured in
    the first alone, before any update.

    >>> mean_of_epochs([{"loss": 1.0, "ess": 0.9}, {"loss": 2.0}])
    {'loss': 1.5, 'ess': 0.9}
    """
    names = dict.fromkeys(name for shown in epochs for name in shown)
    found = {name: [shown[name] for shown in epochs if name in shown] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}
