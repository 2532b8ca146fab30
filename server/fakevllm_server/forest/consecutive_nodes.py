"""Slices of paths, and the search for the first difference of two token sequences. A path is a
sequence of nodes (tokens of a forest, in which calls share common prefixes). It is stored as
slices, which are ranges [start, end) of consecutive node numbers."""

from __future__ import annotations

from array import array

Slices = tuple[tuple[int, int], ...]
"""Ranges of nodes, each [start, end), in ascending order. Adjacent ranges are merged."""


def append_slice(path: Slices, start: int, end: int) -> Slices:
    """Return the path (a sequence of node numbers) extended by the range [start, end). All numbers
    in the path must be smaller than `start`."""
    if path and path[-1][1] == start:
        return (*path[:-1], (path[-1][0], end))
    return (*path, (start, end))


def first_difference(one: array[int], other: array[int], start: int, end: int) -> int:
    """Return the first position in [start, end) at which the two arrays differ. Return `end` if
    there is no such position.

    The search compares blocks of the arrays. Therefore it costs about the same as copying the
    arrays.
    """
    if one[start:end] == other[start:end]:
        return end
    while end - start > 1:
        middle = (start + end) // 2
        if one[start:middle] == other[start:middle]:
            start = middle
        else:
            end = middle
    return start
