"""Find out which bytes of stored pieces must be kept when contents are forgotten.

A content (a stored request, answer or prompt) is a list of slices of pieces, which are stored
blocks of bytes (see contents.py). A content that is forgotten and contents that stay may share a
piece. Of such a piece, only the bytes that the staying contents use may be kept. This module does
no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
Slice = Sequence[int]
"""A part of a piece: id of the piece, index of the first byte, number of bytes."""


class PieceRanges:
    """The byte ranges of some pieces (stored blocks of bytes) that stored requests, answers or
    prompts still use.

    >>> ranges = PieceRanges([7, 8])
    >>> ranges.add([(7, 2, 3), (9, 0, 1)])
    >>> ranges.kept(7, b"abcdefg"), ranges.kept(8, b"abc")
    (b'\\x00\\x00cde\\x00\\x00', None)
    """

    def __init__(self, pieces: Collection[int]) -> None:
        """Create the object without used ranges. `pieces` are ids of stored blocks of bytes. The
        method `add` ignores slices of other pieces."""
        self._ranges: dict[int, set[tuple[int, int]]] = {piece: set() for piece in pieces}

    def add(self, slices: Iterable[Slice]) -> None:
        """Record that these slices of pieces (stored blocks of bytes) are used. Slices of pieces
        that were not passed to the constructor are ignored."""
        for piece, start, size in slices:
            ranges = self._ranges.get(piece)
            if ranges is not None:
                ranges.add((start, start + size))

    def add_whole(self, piece: int) -> None:
        """Record that all bytes of a piece (a stored block of bytes) are used."""
        self.add([(piece, 0, 2**62)])

    def kept(self, piece: int, data: bytes) -> bytes | None:
        """Return the bytes of a piece (a stored block of bytes), with zeros in place of the bytes
        that are in no used range. Return None if the piece has no used range."""
        ranges = self._ranges[piece]
        if not ranges:
            return None
        kept = bytearray(len(data))
        for start, end in ranges:
            kept[start:end] = data[start:end]
        return bytes(kept)


def in_batches(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the values in batches of at most `size`.

    >>> list(in_batches([1, 2, 3], 2))
    [[1, 2], [3]]
    """
    for start in range(0, len(values), size):
        yield values[start : start + size]
