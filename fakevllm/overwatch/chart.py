"""A chart in text: columns of block characters, with a gap where a value is not finite. This module
does no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"
EIGHTHS = 8
"""Number of different heights that a block character can show within one row."""


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return a chart of the values as `height` rows of text, the top row first.

    The chart has one column per value, and at most `width` columns. If there are more than `width`
    values, a column shows the mean of several neighbouring values. The result is [] if no value is
    finite.

    >>> chart([0.0, 0.5, 1.0, math.nan, 1.0], 10, 2)
    ['  █ █', '▁██ █']
    """
    columns = list(_column_means(values, width))
    finite = [value for value in columns if value is not None]
    if not finite:
        return []
    low, high = min(finite), max(finite)
    levels = [None if value is None else _level(value, low, high, height) for value in columns]
    return ["".join(_block(level, row) for level in levels) for row in reversed(range(height))]


def bounds(values: Sequence[float], width: int) -> tuple[float, float] | None:
    """Return (lowest, highest) of the values that the chart's columns show. These two values are at
    the bottom and at the top of the chart. Return None if no value is finite."""
    finite = [value for value in _column_means(values, width) if value is not None]
    return (min(finite), max(finite)) if finite else None


def _column_means(values: Sequence[float], width: int) -> Iterator[float | None]:
    """Distribute the values over the columns of a chart, and yield the mean of each column's finite
    values. For a column without finite values, yield None.

    Any two columns differ by at most one in their number of values.
    """
    num_columns = max(1, min(width, len(values)))
    for column in range(num_columns if values else 0):
        start = column * len(values) // num_columns
        end = (column + 1) * len(values) // num_columns
        finite = [value for value in values[start:end] if math.isfinite(value)]
        # The values are divided before they are added, because a sum may exceed any float.
        yield sum(value / len(finite) for value in finite) if finite else None


def _level(value: float, low: float, high: float, height: int) -> int:
    """Return the height of a column in eighths of a row. The height is at least 1 eighth, so that
    the lowest value is visible."""
    span = high - low
    share = (value - low) / span if span > 0 and math.isfinite(span) else 0.5
    return max(1, round(share * height * EIGHTHS))


def _block(level: int | None, row: int) -> str:
    """Return the character that one row of the chart shows for a column. `level` is the column's
    height in eighths of a row. Row 0 is at the bottom."""
    return BLOCKS[max(0, min(EIGHTHS, (level or 0) - row * EIGHTHS))]
