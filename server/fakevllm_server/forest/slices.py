"""Runs of nodes and of equal tokens."""

from __future__ import annotations

from array import array

Slices = tuple[tuple[int, int], ...]
"""[start, end) each, in order; adjacent ones are merged."""


def joined(path: Slices, start: int, end: int) -> Slices:
    """A path and the nodes that follow on it."""
    if path and path[-1][1] == start:
        return (*path[:-1], (path[-1][0], end))
    return (*path, (start, end))


def first_difference(one: array[int], other: array[int], start: int, end: int) -> int:
    """The first position from `start` on where they differ, or `end`. Compares blocks, so its cost
    is that of copying them."""
    if one[start:end] == other[start:end]:
        return end
    while end - start > 1:
        middle = (start + end) // 2
        if one[start:middle] == other[start:middle]:
            start = middle
        else:
            end = middle
    return start
