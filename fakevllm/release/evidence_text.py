"""Write the figures of a decision about a release as text."""

from __future__ import annotations

from typing import Any


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
