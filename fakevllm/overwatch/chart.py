"""A curve in text: columns of blocks, a gap where there is no number. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"
EIGHTHS = 8


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """Rows from the top, as wide as there are values, at most `width`: then several share a column.

    >>> chart([0.0, 0.5, 1.0, math.nan, 1.0], 10, 2)
    ['  █ █', '▁██ █']
    """
    columns = list(_columns(values, width))
    known = [value for value in columns if value is not None]
    if not known:
        return []
    low, high = min(known), max(known)
    levels = [None if one is None else _level(one, low, high, height) for one in columns]
    return ["".join(_block(level, row) for level in levels) for row in reversed(range(height))]


def bounds(values: Sequence[float], width: int) -> tuple[float, float] | None:
    """What the chart's bottom and top stand for."""
    known = [value for value in _columns(values, width) if value is not None]
    return (min(known), max(known)) if known else None


def _columns(values: Sequence[float], width: int) -> Iterator[float | None]:
    """Means of equal shares, as even as may be."""
    num = max(1, min(width, len(values)))
    for place in range(num if values else 0):
        share = values[place * len(values) // num : (place + 1) * len(values) // num]
        finite = [value for value in share if math.isfinite(value)]
        yield sum(one / len(finite) for one in finite) if finite else None


def _level(value: float, low: float, high: float, height: int) -> int:
    """In eighths of a row; the lowest is still to be seen."""
    span = high - low
    share = (value - low) / span if span > 0 and math.isfinite(span) else 0.5
    return max(1, round(share * height * EIGHTHS))


def _block(level: int | None, row: int) -> str:
    return BLOCKS[max(0, min(EIGHTHS, (level or 0) - row * EIGHTHS))]
