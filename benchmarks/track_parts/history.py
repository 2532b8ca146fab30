"""The figures of earlier versions, one JSON line per figure, and the search for regressions.

A figure is a ratio to a floor of the same run. A slower machine changes both the measured value and
the floor, so the ratio changes little. The ratios of two machines may still differ. Therefore a
figure is compared only with figures of the same machine and the same length of measurement.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

Better = Literal["lower", "higher"]
NUM_COMPARED = 5
"""Number of earlier entries. A new entry is compared with their median."""
MAX_WORSE = 0.10
"""Share by which a figure may be worse than the median before it counts as a regression."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One figure of one version."""

    figure: str
    ratio: float
    floor: str
    """The measurement of the same run that the ratio refers to."""
    better: Better
    commit: str
    machine: str
    at: str
    """Date and time in UTC."""
    is_quick: bool = False
    """Whether the figure comes from the short measurement that `.ci/run` makes."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @staticmethod
    def from_json(line: str) -> Entry:
        """Return the entry of a line. Fields that this version does not know are left out."""
        fields: dict[str, Any] = json.loads(line)
        known = {name: fields[name] for name in Entry.__slots__ if name in fields}
        return Entry(**known)

    def is_comparable_with(self, other: Entry) -> bool:
        """Return whether both entries measure the same figure in the same way."""
        return (self.figure, self.machine, self.is_quick, self.better) == (
            other.figure,
            other.machine,
            other.is_quick,
            other.better,
        )


@dataclass(frozen=True, slots=True)
class Regression:
    """A figure that is worse than before."""

    new: Entry
    median: float
    last_good: Entry
    """The latest earlier entry that is not more than MAX_WORSE worse than the median."""

    def __str__(self) -> str:
        return (
            f"{self.new.figure}: {self.new.ratio:.3g} at {self.new.commit}, and the median of the "
            f"last runs is {self.median:.3g}; the last good run was {self.last_good.ratio:.3g} at "
            f"{self.last_good.commit}"
        )


def read_history(text: str) -> list[Entry]:
    """Return the entries of a history file, oldest first."""
    return [Entry.from_json(line) for line in text.splitlines() if line.strip()]


def find_regressions(history: Sequence[Entry], new: Sequence[Entry]) -> list[Regression]:
    """Return the new entries that are more than MAX_WORSE worse than the median of the last
    NUM_COMPARED comparable entries of `history`, which is in order of time.

    An entry without a comparable earlier entry is no regression.
    """
    return [found for entry in new if (found := _regression_of(history, entry)) is not None]


def _regression_of(history: Sequence[Entry], new: Entry) -> Regression | None:
    earlier = [entry for entry in history if entry.is_comparable_with(new)][-NUM_COMPARED:]
    if not earlier:
        return None
    middle = median(entry.ratio for entry in earlier)
    if not _is_worse(new, middle):
        return None
    # There is a good one, because half of the entries are at least as good as their median.
    last_good = next(entry for entry in reversed(earlier) if not _is_worse(entry, middle))
    return Regression(new, middle, last_good)


def _is_worse(entry: Entry, middle: float) -> bool:
    if entry.better == "lower":
        return entry.ratio > middle * (1 + MAX_WORSE)
    return entry.ratio < middle * (1 - MAX_WORSE)
