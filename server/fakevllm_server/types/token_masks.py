"""What each token of a response was chosen from, where a grammar, top-p or the like left only a
part of the vocabulary. Pure.

A trainer that renormalises over the same set computes the probability that was sampled with. A
packed set is its size in four bytes, and a bit for each token, compressed; all little-endian. Equal
sets of one engine are equal bytes.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fakevllm_adapters.protocol.packed_numbers import pack_ids, unpack_ids

Json = dict[str, Any]

WHOLE = -1
"""In place of a set: all of the vocabulary."""
HEAD = 4
"""Bytes of the size."""
MAX_BYTES = 1 << 20
"""Of a set: no vocabulary has eight million tokens."""
REMEMBERED = 256
"""Siblings go through the same grammar, so their sets come again."""


@lru_cache(REMEMBERED)
def packed(bits: bytes) -> bytes:
    """
    >>> unpacked(packed(bytes([0b101, 0])))
    b'\\x05'
    """
    return _size_bytes(bits) + zlib.compress(bits.rstrip(b"\0"), 1)


def unpacked(one: bytes) -> bytes:
    """Without zeros at its end. Raises ValueError for what is no packed set."""
    reader = zlib.decompressobj()
    try:
        bits = reader.decompress(one[HEAD:], MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"not a packed set: {error}") from None
    if not reader.eof:
        raise ValueError("not a packed set: it has no end")
    return bits


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """
    >>> allowed = TokenMasks.of([None, packed(bytes([0b110])), packed(bytes([0b100]))])
    >>> allowed.of_token, allowed.sizes, allowed.is_forced
    ([-1, 0, 1], [2, 1], [False, False, True])
    """

    sets: Sequence[bytes]
    """Packed, each once."""
    of_token: Sequence[int]
    """For each token of the response the index of its set, or WHOLE."""

    @staticmethod
    def of(chosen_from: Sequence[bytes | None]) -> TokenMasks:
        """The packed set of each token, None for all of the vocabulary."""
        table: dict[bytes, int] = {}
        of_token = [
            WHOLE if one is None else table.setdefault(one, len(table)) for one in chosen_from
        ]
        return TokenMasks(list(table), of_token)

    @property
    def sizes(self) -> list[int]:
        """How many tokens are in each set."""
        return [int.from_bytes(one[:HEAD], "little") for one in self.sets]

    @property
    def num_forced(self) -> int:
        return sum(self.is_forced)

    @property
    def is_forced(self) -> list[bool]:
        """For each token, whether no other could have been sampled: there is nothing to learn."""
        is_single = [size == 1 for size in self.sizes]
        return [index != WHOLE and is_single[index] for index in self.of_token]

    def set_of(self, at: int) -> bytes | None:
        """None for all of the vocabulary."""
        index = self.of_token[at]
        return None if index == WHOLE else self.sets[index]

    def holds(self, ids: Sequence[int]) -> bool:
        """Whether each of the response's tokens is in its own set."""
        if len(ids) != len(self.of_token):
            return False
        bits = [unpacked(one) for one in self.sets]
        return all(
            index == WHOLE or _is_in(id, bits[index])
            for id, index in zip(ids, self.of_token, strict=True)
        )

    @staticmethod
    def read(told: Any, ids: Sequence[int]) -> TokenMasks | None:
        """From an engine's answer; None where it does not say of each of these tokens what it was
        chosen from."""
        try:
            allowed = TokenMasks.from_wire(told)
            return allowed if allowed.holds(ids) else None
        except (ValueError, TypeError, KeyError):
            return None

    def to_wire(self) -> Json:
        sets = [base64.b64encode(one).decode() for one in self.sets]
        return {"sets": sets, "of_token": pack_ids(self.of_token)}

    @staticmethod
    def from_wire(wire: Json) -> TokenMasks:
        """Raises ValueError, TypeError, KeyError for what none wrote."""
        sets = [base64.b64decode(one, validate=True) for one in wire["sets"]]
        of_token = unpack_ids(wire["of_token"])
        if any(not WHOLE <= index < len(sets) for index in of_token):
            raise ValueError("a token is of a set that is not there")
        return TokenMasks(sets, of_token)


def _size_bytes(bits: bytes) -> bytes:
    return int.from_bytes(bits).bit_count().to_bytes(HEAD, "little")


def _is_in(id: int, bits: bytes) -> bool:
    return id >> 3 < len(bits) and bool(bits[id >> 3] >> (id & 7) & 1)
