"""The nesting depth of JSON texts."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.http.json_depth import is_deeper
from tests.adapters.http.json_values import VALUES


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    return 0


@given(VALUES, st.booleans(), st.sampled_from([None, 2]), st.integers(0, 8))
def test_the_depth_equals_that_of_the_parsed_value_in_every_spelling(
    value: Any, is_ascii: bool, indent: int | None, most: int
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    raw = text.encode("utf-8", "surrogatepass")
    assert is_deeper(raw, most) is (depth(value) > most)


@given(VALUES, st.sampled_from(["utf-16", "utf-16-be", "utf-32", "utf-8-sig"]), st.integers(0, 4))
def test_no_encoding_that_json_reads_hides_nesting(value: Any, encoding: str, most: int) -> None:
    raw = json.dumps(value).encode(encoding)
    assert json.loads(raw) == value
    assert is_deeper(raw, most) or depth(value) <= most
