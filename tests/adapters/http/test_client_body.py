"""Bodies of clients: forbidden fields are removed, everything else stays."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.http.client_body import (
    FORBIDDEN_FIELDS,
    CheckedBody,
    check_body,
    rewrite_body,
    without_forbidden_fields,
)
from fakevllm_adapters.http.limits import Limits
from fakevllm_adapters.protocol.errors import Json, WireError
from tests.adapters.http.json_values import VALUES

LIMITS = Limits()
FINE: list[Json] = [
    {"n": 64, "stop": ["x" * 1000] * 64, "bad_words": ["x"] * 256, "tools": [{}] * 512},
    {"n": None, "stop": None, "tools": None, "logit_bias": None},
    {"n": "many", "stop": 5, "tools": "x" * 9999, "bad_words": {}, "logit_bias": []},
    {"n": [1, 2], "stop": [None, 5, ["x" * 2000]]},
    {"n": -1},
    {},
]


@given(st.binary(max_size=60) | st.text('[]{}"\\a', max_size=60).map(str.encode))
def test_any_bytes_are_accepted_or_refused_with_400(raw: bytes) -> None:
    try:
        result = check_body(raw, Limits(json_depth=3))
    except WireError as error:
        assert error.status == 400
    else:
        assert result.raw == raw or result.removed


def test_orjson_can_write_every_accepted_body() -> None:
    value: Any = 1
    for _ in range(200):  # the most the configuration allows
        value = [value]
    body = check_body(orjson.dumps({"x": value}), Limits(json_depth=201)).body
    assert orjson.loads(orjson.dumps(body)) == {"x": value}


@pytest.mark.parametrize("body", FINE)
def test_a_body_within_the_limits_or_with_wrong_types_is_unchanged(
    body: dict[str, Any],
) -> None:
    raw = orjson.dumps(body)
    assert check_body(raw, LIMITS) == CheckedBody(raw, body, ())


@given(VALUES, st.sets(st.sampled_from(sorted(FORBIDDEN_FIELDS)), max_size=3))
def test_forbidden_fields_are_removed_and_nothing_else(value: Any, names: set[str]) -> None:
    body = {"model": "m", "x": value, **{name: {"a": 1} for name in names}, "messages": [value]}
    kept, removed = without_forbidden_fields(body)
    assert set(removed) == names
    assert kept == {"model": "m", "x": value, "messages": [value]}
    assert list(kept) == [name for name in body if name not in names]
    assert without_forbidden_fields(body, allowed=names) == (body, ())


def test_a_body_without_forbidden_fields_keeps_its_bytes() -> None:
    raw = b'{ "model":"m",  "x": 1.10, "x": 1e5 }'
    assert check_body(raw, LIMITS).raw is raw
    checked = check_body(b'{"a":1,"kv_transfer_params":{"b":2},"c":"\xc3\xa9"}', LIMITS)
    assert checked.raw == '{"a":1,"c":"é"}'.encode() and checked.removed == ("kv_transfer_params",)
    assert check_body(b'{"vllm_xargs":{}}', LIMITS, allowed=["vllm_xargs"]).removed == ()


def test_numbers_keep_their_digits_if_another_field_is_removed() -> None:
    raw = b'{"vllm_xargs":{},"seed":-9223372036854780917,"x":[100000000000000000000000,1e-5,-0.0]}'
    kept = check_body(raw, LIMITS).raw
    assert kept == b'{"seed":-9223372036854780917,"x":[100000000000000000000000,1e-05,-0.0]}'


@pytest.mark.parametrize(
    "raw",
    [
        b'{"kv_transfer_params": 1, "temperature": NaN, "x": 2}',
        b'{"kv_transfer_params": 1, "temperature": 1e999, "x": 2}',
        b'{"kv_\\u0074ransfer_params": 1, "messages": "\\ud83d", "x": 2}',
        b'\xef\xbb\xbf{"kv_transfer_params": 1, "x": 2}',
        '{"kv_transfer_params": 1, "x": 2}'.encode("utf-16"),
    ],
)
def test_forbidden_fields_are_removed_from_bodies_that_only_pythons_json_reads(raw: bytes) -> None:
    result = check_body(raw, LIMITS)
    assert result.body is None and result.removed == ("kv_transfer_params",)
    kept, sent = json.loads(result.raw), json.loads(raw)
    del sent["kv_transfer_params"]
    assert repr(kept) == repr(sent) and kept["x"] == 2


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{", b'"x"', b'{"a":NaN}', b"\xff\xfe\xff", b"null"])
def test_a_body_that_is_not_an_object_keeps_its_bytes(raw: bytes) -> None:
    assert check_body(raw, LIMITS) == CheckedBody(raw, None, ())


def test_a_rewritten_body_keeps_its_numbers_and_characters() -> None:
    raw = b'{"model": "a", "seed": 99999999999999999999, "text": "\\u00e9"}'
    fields = json.loads(rewrite_body(raw, without=["text"], model="b"))
    assert fields == {"model": "b", "seed": 99999999999999999999}
    assert rewrite_body(raw, model="b").endswith('"text":"é"}'.encode())
