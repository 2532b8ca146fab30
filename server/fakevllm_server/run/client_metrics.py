"""The metrics that clients send in the field `log_metrics` when they end an episode.

Each metric is averaged over the episodes that end between two training steps, and is logged with
the later step. Until then the values are only in memory. If the server dies, they are lost. The
module does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

PREFIX = "train_"
"""Prefix of the names of the metrics. AgentJet's clients expect this prefix."""
MAX_NAMES = 100
"""Maximum number of different metrics in one step."""
MAX_NAME_CHARS = 100
"""Maximum length of a metric's name in characters."""


class ClientMetrics:
    """The metrics that clients have sent for the next training step."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, metrics: Mapping[str, float | Sequence[float]]) -> list[str]:
        """Add the metrics of one episode to the means for the next training step, and return the
        names of the metrics that were refused.

        If a metric is a list of values, its mean is used. A metric is refused if its name is too
        long. A new name is also refused if there are already MAX_NAMES metrics.
        """
        refused: list[str] = []
        for name, value in metrics.items():
            has_room = name in self._values or len(self._values) < MAX_NAMES
            if len(name) > MAX_NAME_CHARS or not has_room:
                refused.append(name)
            elif isinstance(value, int | float):
                self._values.setdefault(name, []).append(value)
            elif value:
                self._values.setdefault(name, []).append(fmean(value))
        return refused

    def take(self) -> dict[str, float]:
        """Return the mean of each metric that clients have sent, and remove all values. The next
        step then starts without values.

        >>> metrics = ClientMetrics()
        >>> _ = metrics.add({"tools": 1.0}), metrics.add({"tools": [2.0, 4.0]})
        >>> metrics.take(), metrics.take()
        ({'train_tools': 2.0}, {})
        """
        values, self._values = self._values, {}
        return {PREFIX + name: fmean(numbers) for name, numbers in values.items()}
