"""Compressed columns are read as they were written, and damage raises at most a ValueError."""

from __future__ import annotations

import contextlib
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_server.journal.compression import (
    compress_facts,
    compress_numbers,
    decompress_facts,
    decompress_numbers,
)

INT32 = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=200)
FLOAT32 = st.lists(st.floats(width=32), max_size=200)
ARRAYS = INT32.map(lambda numbers: array("i", numbers).tobytes()) | FLOAT32.map(
    lambda numbers: array("f", numbers).tobytes()
)


@given(ARRAYS | st.binary(max_size=50))
def test_numbers_are_read_as_they_were_compressed(data: bytes) -> None:
    assert decompress_numbers(compress_numbers(data)) == data


@given(ARRAYS, st.data())
def test_a_changed_byte_raises_a_value_error_or_gives_bytes(
    data: bytes, draws: st.DataObject
) -> None:
    damaged = bytearray(compress_numbers(data))
    at = draws.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= draws.draw(st.integers(1, 255))
    with contextlib.suppress(ValueError):
        assert isinstance(decompress_numbers(bytes(damaged)), bytes)


@given(ARRAYS)
def test_missing_and_additional_bytes_raise_a_value_error(data: bytes) -> None:
    compressed = compress_numbers(data)
    for damaged in (b"", compressed[:-1], compressed + b"\0"):
        with pytest.raises(ValueError):
            decompress_numbers(damaged)


def test_token_ids_take_less_than_five_eighths_of_their_bytes() -> None:
    chosen = random.Random(0)
    ids = array("i", [chosen.randrange(150_000) for _ in range(10_000)]).tobytes()
    assert len(compress_numbers(ids)) < len(ids) * 5 / 8


@given(st.text(st.characters(exclude_categories=["Cs"])), st.data())
def test_facts_are_read_as_they_were_compressed(text: str, draws: st.DataObject) -> None:
    compressed = compress_facts(text)
    assert decompress_facts(compressed) == text
    for damaged in (b"", compressed[:-1], compressed + b"\0"):
        with pytest.raises(ValueError):
            decompress_facts(damaged)
    changed = bytearray(compressed)
    changed[draws.draw(st.integers(0, len(changed) - 1))] ^= draws.draw(st.integers(1, 255))
    with contextlib.suppress(ValueError):
        assert isinstance(decompress_facts(bytes(changed)), str)
