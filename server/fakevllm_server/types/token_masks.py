"""Token masks. A mask is the set of tokens from which one token of a response was sampled.

A grammar, top-p and similar settings leave only a part of the vocabulary to sample from. If the
trainer normalises over the same part, it computes the probability with which the engine sampled.

A set is stored as bytes, called a packed set. The first four bytes are the number of tokens in the
set, in little-endian order. The rest is a bitmap with one bit for each token id, compressed with
zlib. Equal sets from one engine have equal bytes. The module does no I/O.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fakevllm_adapters.protocol.packed_numbers import pack_ids, unpack_ids
from fakevllm_server.types.number_arrays import id_array

Json = dict[str, Any]

WHOLE = -1
"""Index that stands for the whole vocabulary, which needs no packed set."""
SIZE_BYTES = 4
"""Number of bytes at the start of a packed set that store the number of tokens in the set."""
MAX_BYTES = 1 << 20
"""Maximum number of bytes in a bitmap. No vocabulary has eight million tokens."""
CACHE_SIZE = 256
"""Maximum number of cached packed sets. Siblings follow the same grammar, so sets repeat."""


@lru_cache(CACHE_SIZE)
def packed(bits: bytes) -> bytes:
    """Return a bitmap of token ids as a packed set (size and compressed bitmap). The lowest bit of
    the bitmap's first byte stands for token 0.

    >>> unpacked(packed(bytes([0b101, 0])))
    b'\\x05'
    """
    return _size_bytes(bits) + zlib.compress(bits.rstrip(b"\0"), 1)


def unpacked(packed_set: bytes) -> bytes:
    """Return the bitmap in a packed set (the size and the compressed bitmap of a set of token ids).
    The bitmap has no trailing zero bytes.

    Raises ValueError if `packed_set` does not have the format of a packed set.
    """
    reader = zlib.decompressobj()
    try:
        bits = reader.decompress(packed_set[SIZE_BYTES:], MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"not a packed set: {error}") from None
    if not reader.eof:
        raise ValueError("not a packed set: the compressed bitmap is cut off or too long")
    return bits


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """For each token of one response, the set of tokens from which it was sampled.

    >>> allowed = TokenMasks.from_packed_sets(
    ...     [None, packed(bytes([0b110])), packed(bytes([0b100]))]
    ... )
    >>> allowed.set_indices, allowed.sizes, allowed.is_forced
    ([-1, 0, 1], [2, 1], [False, False, True])
    """

    sets: Sequence[bytes]
    """The distinct packed sets."""
    set_indices: Sequence[int]
    """For each token of the response, the index in `sets` of the token's set, or WHOLE."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "set_indices", id_array(self.set_indices))

    @staticmethod
    def from_packed_sets(packed_sets: Sequence[bytes | None]) -> TokenMasks:
        """Create masks from a list with one packed set for each token of the response. None in the
        list means the whole vocabulary."""
        table: dict[bytes, int] = {}
        indices = [
            WHOLE if packed_set is None else table.setdefault(packed_set, len(table))
            for packed_set in packed_sets
        ]
        return TokenMasks(list(table), indices)

    @property
    def sizes(self) -> list[int]:
        """Number of tokens in each of the sets in `sets`."""
        return [int.from_bytes(packed_set[:SIZE_BYTES], "little") for packed_set in self.sets]

    @property
    def num_forced(self) -> int:
        """Number of forced tokens in the response. A token is forced if no other token was allowed
        at its position."""
        return sum(self.is_forced)

    @property
    def is_forced(self) -> list[bool]:
        """For each token of the response, True if the token was forced: no other token was allowed
        at its position.

        Nothing can be learned from a forced token.
        """
        is_single = [size == 1 for size in self.sizes]
        return [index != WHOLE and is_single[index] for index in self.set_indices]

    def packed_set_at(self, position: int) -> bytes | None:
        """Return the packed set (size and compressed bitmap) of the tokens that were allowed at
        `position` of the response. Return None if the whole vocabulary was allowed."""
        index = self.set_indices[position]
        return None if index == WHOLE else self.sets[index]

    def contains_response(self, ids: Sequence[int]) -> bool:
        """Return True if each token of the response `ids` was allowed at its position."""
        if len(ids) != len(self.set_indices):
            return False
        bits = [unpacked(packed_set) for packed_set in self.sets]
        return all(
            index == WHOLE or _contains_token(bits[index], id)
            for id, index in zip(ids, self.set_indices, strict=True)
        )

    @staticmethod
    def from_engine_answer(wire: Any, ids: Sequence[int]) -> TokenMasks | None:
        """Parse the masks in an engine's answer. `wire` is the JSON value of the masks, and `ids`
        are the token ids of the response.

        Return None in three cases: `wire` is malformed, `wire` has no set for a position of the
        response, or a token is not in the set for its position.
        """
        try:
            allowed = TokenMasks.from_wire(wire)
            return allowed if allowed.contains_response(ids) else None
        except (ValueError, TypeError, KeyError):
            return None

    def to_wire(self) -> Json:
        """Return the masks as a JSON object, which `from_wire` parses."""
        sets = [base64.b64encode(packed_set).decode() for packed_set in self.sets]
        return {"sets": sets, "of_token": pack_ids(self.set_indices)}

    @staticmethod
    def from_wire(wire: Json) -> TokenMasks:
        """Return the masks from the JSON object that `to_wire` returns.

        Raises ValueError, TypeError or KeyError if `wire` has any other form.
        """
        sets = [base64.b64decode(text, validate=True) for text in wire["sets"]]
        indices = unpack_ids(wire["of_token"])
        if any(not WHOLE <= index < len(sets) for index in indices):
            raise ValueError("a token refers to a set that does not exist")
        return TokenMasks(sets, indices)


def _size_bytes(bits: bytes) -> bytes:
    """Return the number of tokens in a bitmap, encoded for the beginning of a packed set."""
    return int.from_bytes(bits).bit_count().to_bytes(SIZE_BYTES, "little")


def _contains_token(bits: bytes, id: int) -> bool:
    return id >> 3 < len(bits) and bool(bits[id >> 3] >> (id & 7) & 1)
