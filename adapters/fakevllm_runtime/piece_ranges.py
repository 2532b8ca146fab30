"""The ranges of stored pieces that contents still use (see contents.py).

A content that is forgotten may share a piece with a content that stays. Only the bytes that the
other content uses may then stay. The module decides which bytes these are. It does no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
Slice = Sequence[int]
"""A part of a piece: id of the piece, index of the first byte, number of bytes."""


class PieceRanges:
    """The used ranges of some pieces.

    >>> ranges = PieceRanges([7, 8])
    >>> ranges.add([(7, 2, 3), (9, 0, 1)])
    >>> ranges.kept(7, b"abcdefg"), ranges.kept(8, b"abc")
    (b'\\x00\\x00cde\\x00\\x00', None)
    """

    def __init__(self, pieces: Collection[int]) -> None:
        """Begin without used ranges. Only the ranges of `pieces` are collected."""
        self._ranges: dict[int, set[tuple[int, int]]] = {piece: set() for piece in pieces}

    def add(self, slices: Iterable[Slice]) -> None:
        """Add the slices of a content that stays."""
        for piece, start, size in slices:
            ranges = self._ranges.get(piece)
            if ranges is not None:
                ranges.add((start, start + size))

    def add_whole(self, piece: int) -> None:
        """Add a content that consists of a whole piece."""
        self.add([(piece, 0, 2**62)])

    def kept(self, piece: int, data: bytes) -> bytes | None:
        """Return the bytes of a piece with zeros in place of all bytes that no content uses. The
        length stays the same. Return None if no content uses the piece."""
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
