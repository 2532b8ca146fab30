"""What active clients measure themselves (`log_metrics` of an ended episode): means over the
episodes that end while a step is collected, told with that step. Pure.

They are kept in memory until then: a server that dies takes those of the step in hand with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

PREFIX = "train_"
"""As AgentJet's clients know them."""
MAX_NAMES = 100
MAX_NAME_CHARS = 100


class ClientMetrics:
    def __init__(self) -> None:
        self._heard: dict[str, list[float]] = {}

    def add(self, metrics: Mapping[str, float | Sequence[float]]) -> list[str]:
        """Of one episode; a list counts as its mean. Names that are too long or too many, which do
        not count."""
        refused: list[str] = []
        for name, value in metrics.items():
            is_room = name in self._heard or len(self._heard) < MAX_NAMES
            if len(name) > MAX_NAME_CHARS or not is_room:
                refused.append(name)
            elif isinstance(value, int | float):
                self._heard.setdefault(name, []).append(value)
            elif value:
                self._heard.setdefault(name, []).append(fmean(value))
        return refused

    def take(self) -> dict[str, float]:
        """
        >>> heard = ClientMetrics()
        >>> _ = heard.add({"tools": 1.0}), heard.add({"tools": [2.0, 4.0]})
        >>> heard.take(), heard.take()
        ({'train_tools': 2.0}, {})
        """
        heard, self._heard = self._heard, {}
        return {PREFIX + name: fmean(values) for name, values in heard.items()}
