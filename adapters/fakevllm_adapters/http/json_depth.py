"""Measure the nesting depth of a JSON text without parsing the text. This module does no I/O."""

from __future__ import annotations

from itertools import accumulate
from operator import add

_BRACKETS = b'"[]{}'
_ALL_BUT_BRACKETS = bytes(sorted(set(range(256)) - set(_BRACKETS)))
_AS_BITS = bytes.maketrans(b"[{]}", b"1100")
_BITS = 8
_RISE = [2 * bits.bit_count() - _BITS for bits in range(2**_BITS)]
"""For each pattern of eight consecutive brackets: the change of the nesting level over these
brackets. The index is the pattern as a number of eight bits, in which the bit 1 is an opening
bracket."""
_PEAK = [
    max(accumulate(1 if bits >> at & 1 else -1 for at in reversed(range(_BITS))))
    for bits in range(2**_BITS)
]
"""For each pattern of eight consecutive brackets: the highest nesting level within the pattern,
relative to the level before the pattern. The index is the same as for `_RISE`."""


def is_deeper(raw: bytes, depth: int) -> bool:
    """Return True if the arrays and objects of a JSON text are nested deeper than `depth` levels.

    The result is right for every valid JSON text in UTF-8. For any other text, the result may be
    True although the text is not nested so deeply.

    >>> is_deeper(b'[{"a": "[[["}]', 2), is_deeper(b"[[[]]]", 2)
    (False, True)
    """
    if raw.count(b"[") + raw.count(b"{") <= depth:
        return False
    if b"\0" in raw:  # UTF-16 or UTF-32: single bytes do not show where strings begin and end
        return True
    # Remove escapes first, then everything but quotes and brackets, then strings without brackets.
    # Every second part of the rest, split at quotes, is a string.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _ALL_BUT_BRACKETS)
    outside = b"".join(plain.replace(b'""', b"").split(b'"')[::2])
    return _peaks_above(outside, depth)


def _peaks_above(brackets: bytes, depth: int) -> bool:
    """Return True if the brackets are nested deeper than `depth` levels.

    `brackets` must contain only brackets, and may have 30 million of them. For speed, eight
    brackets are processed at a time, and only by Python's built-in functions.
    """
    bits = brackets.translate(_AS_BITS)
    bits += b"0" * (-len(bits) % _BITS)
    eights = int(bits or b"0", 2).to_bytes(len(bits) // _BITS)
    levels = accumulate(map(_RISE.__getitem__, eights), initial=0)
    return any(map(depth.__lt__, map(add, levels, map(_PEAK.__getitem__, eights))))
