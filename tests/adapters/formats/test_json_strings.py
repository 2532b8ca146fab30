"""Strings at a path in JSON bytes, which may be cut off at any byte."""

from __future__ import annotations

import time

import orjson
import pytest

from fakevllm_adapters.formats.json_strings import find_string

PATHS = frozenset({(b"id",), (b"response", b"id")})


def found(raw: bytes) -> bytes | None:
    span = find_string(raw, PATHS)
    return None if span is None else raw[slice(*span)]


@pytest.mark.parametrize("chosen", ["resp_1", 'a"b', "a\\", '\\"', "a: b", "{[", ""])
def test_a_string_is_found_as_soon_as_it_is_complete_and_never_before(chosen: str) -> None:
    written = orjson.dumps(chosen)
    event = b'data: {"type": "x", "response" : {"n": 1, "id": %s, "object": "y"}}' % written
    end = event.index(written) + len(written)
    for length in range(len(event) + 1):
        assert found(event[:length]) == (written[1:-1] if length >= end else None)


def test_a_key_that_is_cut_off_is_not_the_value_of_the_key_before_it() -> None:
    assert found(b'{"id": 5, "object"') is None
    assert found(b'{"id": null, "response": {"id": "r"}}') == b"r"


@pytest.mark.parametrize("unit", [rb"\"", rb"\\", '"', '"" ', '{"a":"b",', "["], ids=repr)
def test_the_time_is_linear_in_the_size(unit: bytes | str) -> None:
    many = (unit.encode() if isinstance(unit, str) else unit) * 2**16
    for raw in (b'{"id":"' + many, b'{"x":"y",' + many, many):
        started = time.process_time()
        find_string(raw, PATHS)
        assert time.process_time() - started < 5
