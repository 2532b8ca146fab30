"""Write the versions and the figures of decisions about releases as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MAX_RANGES = 20
"""Maximum number of ranges of rejected versions that are listed."""


def difference(evidence: dict[str, Any]) -> str:
    """Return a text with the difference of two mean rewards and its confidence interval. Return a
    dash if `evidence` lacks one of these figures.

    >>> difference({"difference": -0.1, "low": -0.14, "high": -0.06})
    '-0.100 (-0.140 to -0.060)'
    >>> difference({})
    '-'
    """
    numbers = [evidence.get(name) for name in ("difference", "low", "high")]
    if not all(isinstance(number, int | float) for number in numbers):
        return "-"
    mean, low, high = (f"{number:+.3f}" for number in numbers)
    return f"{mean} ({low} to {high})"


def ranges(versions: Sequence[int]) -> str:
    """Return an ascending list of version numbers as a short text.

    >>> ranges([4, 5, 6, 9]), ranges([])
    ('4 to 6, 9', 'none')
    """
    spans: list[tuple[int, int]] = []
    for version in versions:
        if spans and spans[-1][1] == version - 1:
            spans[-1] = (spans[-1][0], version)
        else:
            spans.append((version, version))
    left_out = len(spans) - MAX_RANGES
    texts = [str(low) if low == high else f"{low} to {high}" for low, high in spans[:MAX_RANGES]]
    return ", ".join(texts) + (f" and {left_out} more" if left_out > 0 else "") or "none"
