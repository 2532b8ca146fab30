"""Reduce a learning curve to as many points as a chart can show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fakevllm.ledger.records import StepRow

MAX_POINTS = 400
"""Maximum number of points of a chart, apart from those that changes of the hooks add."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The means of one or several consecutive steps. A mean is None if no answer of these steps
    counts for it."""

    first_step: int
    last_step: int
    groups: int
    policy_mean: float | None
    """Mean reward of all sampled answers, which shows how good the policy is."""
    returned_best: float | None
    """Mean reward of the answers that apps got, without those that were chosen at random."""
    returned_random: float | None
    """Mean reward of the answers that apps got and that were chosen at random."""
    without_signal: int
    """Number of groups whose rewards are all equal."""
    changed: str = ""
    """What changed before the first step. The means before and after it cannot be compared."""


def curve_points(rows: Sequence[StepRow], max_points: int = MAX_POINTS) -> list[CurvePoint]:
    """Return the points of a curve, in the order of the steps. No point has steps from before and
    after a change of the hooks or the job.

    >>> rows = [StepRow(step, 1, float(step), None, 0) for step in range(4)]
    >>> [point.policy_mean for point in curve_points(rows, 2)]
    [0.5, 2.5]
    """
    size = max(1, -(-len(rows) // max_points))
    return [_point(part) for part in _parts(rows, size)]


def _parts(rows: Sequence[StepRow], size: int) -> Iterator[list[StepRow]]:
    part: list[StepRow] = []
    for row in rows:
        if part and (row.changed or len(part) == size):
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _point(rows: Sequence[StepRow]) -> CurvePoint:
    return CurvePoint(
        rows[0].step,
        rows[-1].step,
        sum(row.groups for row in rows),
        _mean(rows, lambda row: row.policy_mean),
        _mean(rows, lambda row: row.returned_best),
        _mean(rows, lambda row: row.returned_random),
        sum(row.without_signal for row in rows),
        rows[0].changed,
    )


def _mean(rows: Sequence[StepRow], value: Callable[[StepRow], float | None]) -> float | None:
    """Return the mean of a column over the steps, weighted by the number of groups."""
    pairs = [(mean, row.groups) for row in rows if (mean := value(row)) is not None]
    num = sum(groups for _, groups in pairs)
    return None if num == 0 else sum(mean * groups for mean, groups in pairs) / num
