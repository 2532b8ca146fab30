"""Compress arrays of 4-byte numbers: token ids and log-probabilities.

The first bytes of all numbers are compressed as one stream, then the second bytes, and so on. Token
ids then take about half of their bytes, because their high bytes are nearly always equal. The low
bytes of log-probabilities are random, and are stored as they are.
"""

from __future__ import annotations

import zlib

WIDTH = 4
"""Number of bytes of a number. Other data can be compressed too, but takes more bytes."""
LEVEL = 6
_RAW_DEFLATE = -zlib.MAX_WBITS
"""A stream without a header and a checksum. The digest of a call detects damage."""


def compress_numbers(data: bytes) -> bytes:
    """Return the data in compressed form.

    >>> ids = bytes([7, 1, 0, 0] * 100)
    >>> len(compress_numbers(ids)) < 30, decompress_numbers(compress_numbers(ids)) == ids
    (True, True)
    """
    return b"".join(
        zlib.compress(data[place::WIDTH], LEVEL, wbits=_RAW_DEFLATE) for place in range(WIDTH)
    )


def decompress_numbers(compressed: bytes) -> bytes:
    """Return the data that `compress_numbers` has compressed. Raises ValueError if it is damaged.
    Some damage is not detected, and gives other data."""
    parts: list[bytes] = []
    for _ in range(WIDTH):
        stream = zlib.decompressobj(wbits=_RAW_DEFLATE)
        try:
            parts.append(stream.decompress(compressed))
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if not stream.eof:
            raise ValueError("the end is missing")
        compressed = stream.unused_data
    if compressed:
        raise ValueError("more bytes than were compressed")
    data = bytearray(sum(len(part) for part in parts))
    for place, part in enumerate(parts):
        data[place::WIDTH] = part  # raises ValueError if the number of bytes differs
    return bytes(data)
