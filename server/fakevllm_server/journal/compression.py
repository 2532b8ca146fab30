"""Compress the columns of captured calls. The columns for token ids and log-probabilities are
arrays of 4-byte numbers. The column for the facts of a call, such as its weight versions, is JSON.

An array is compressed as four streams: the first bytes of all numbers, their second bytes, and so
on. Token ids then take about half of their bytes, because their high bytes are nearly always equal.
The low bytes of log-probabilities are random, and are stored without compression.
"""

from __future__ import annotations

import zlib

WIDTH = 4
"""Number of bytes of a number. Numbers of another width can be compressed too, but less well."""
LEVEL = 2
"""Compression level. Level 4 would make the ids of a text with 150,000 different tokens 1.5 %
smaller, and those of a text with one token per byte 20 %, but would take up to twice as long."""
_RAW_DEFLATE = -zlib.MAX_WBITS
"""zlib's setting for a stream without header and checksum. The stream needs no checksum, because
the digest of a call detects damage."""
_TYPICAL_FACTS = b'{"versions":[[1,0,1]],"temperature":1.0,"finish_reason":"stop"}'
"""Text that the facts of a call usually contain, as zlib's preset dictionary. Never change the
text, because stored facts can be decompressed only with the same text."""


def compress_numbers(data: bytes) -> bytes:
    """Return an array of 4-byte numbers in compressed form. `data` is the bytes of the array.

    >>> ids = bytes([7, 1, 0, 0] * 100)
    >>> len(compress_numbers(ids)) < 30, decompress_numbers(compress_numbers(ids)) == ids
    (True, True)
    """
    return b"".join(_deflated(data[place::WIDTH]) for place in range(WIDTH))


def decompress_numbers(compressed: bytes) -> bytes:
    """Return the data that `compress_numbers` has compressed. Raises ValueError for some kinds of
    damage. Other damage makes the result wrong, and only the call's digest shows such damage."""
    parts: list[bytes] = []
    for _ in range(WIDTH):
        part, compressed = _inflated(compressed)
        parts.append(part)
    if compressed:
        raise ValueError("more bytes than were compressed")
    data = bytearray(sum(len(part) for part in parts))
    for place, part in enumerate(parts):
        data[place::WIDTH] = part  # raises ValueError if the number of bytes differs
    return bytes(data)


def compress_facts(text: str) -> bytes:
    """Compress the facts of a model call, such as its weight versions. `text` is JSON.

    >>> facts = '{"versions":[[7,0,99]],"temperature":0.7,"finish_reason":"stop"}'
    >>> len(compress_facts(facts)) < 20, decompress_facts(compress_facts(facts)) == facts
    (True, True)
    """
    return _deflated(text.encode(), _TYPICAL_FACTS)


def decompress_facts(compressed: bytes) -> str:
    """Return the text that `compress_facts` has compressed. Raises ValueError for some kinds of
    damage. Other damage makes the result wrong, and only the call's digest shows such damage."""
    text, rest = _inflated(compressed, _TYPICAL_FACTS)
    if rest:
        raise ValueError("more bytes than were compressed")
    return text.decode()


def _deflated(data: bytes, zdict: bytes = b"") -> bytes:
    # Small tables for short data: clearing large ones takes longer than compressing an answer.
    sizes = (-10, 4) if len(data) <= 1024 else (_RAW_DEFLATE, zlib.DEF_MEM_LEVEL)
    stream = zlib.compressobj(LEVEL, zlib.DEFLATED, *sizes, zlib.Z_DEFAULT_STRATEGY, zdict)
    return stream.compress(data) + stream.flush()


def _inflated(compressed: bytes, zdict: bytes = b"") -> tuple[bytes, bytes]:
    """Return the decompressed data of the first deflate stream in `compressed`, and the bytes after
    this stream."""
    stream = zlib.decompressobj(_RAW_DEFLATE, zdict)
    try:
        data = stream.decompress(compressed)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not stream.eof:
        raise ValueError("the end is missing")
    return data, stream.unused_data
