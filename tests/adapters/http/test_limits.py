"""Limits on the headers and fields of one request."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.http.client_body import check_body
from fakevllm_adapters.http.limits import Limits
from fakevllm_adapters.protocol.errors import Json, WireError

LIMITS = Limits()

TOO_MUCH: list[tuple[Json, str]] = [
    ({"request_id": "x" * 257}, "request_id"),
    ({"n": 65}, "n"),
    ({"n": "65"}, "n"),
    ({"n": 65.0}, "n"),
    ({"n": 2**70}, "n"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop": "x" * 1001}, "stop"),
    ({"stop": ["ok", "x" * 1001]}, "stop"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
    ({"bad_words": ["x"] * 257}, "bad_words"),
    ({"bad_words": ["x" * 1001]}, "bad_words"),
    ({"tools": [{}] * 513}, "tools"),
    ({"functions": [{}] * 513}, "functions"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"stop_token_ids": [0] * 1025}, "stop_token_ids"),
    ({"allowed_token_ids": [0] * (2**18 + 1)}, "allowed_token_ids"),
]


def refusal_of(raw: bytes, limits: Limits = LIMITS, num_siblings: int = 1) -> WireError:
    with pytest.raises(WireError) as refusal:
        check_body(raw, limits, num_siblings)
    assert refusal.value.body["error"].keys() == {"message", "type", "param", "code"}
    assert refusal.value.body["error"]["code"] == refusal.value.status
    return refusal.value


@pytest.mark.parametrize("unit", [b"[", b'{"a":', b'[{"a":', b'["]",'])
@pytest.mark.parametrize("num", [65, 1024, 100_000])
def test_json_that_nests_too_deep_is_refused_whether_it_is_complete_or_not(
    unit: bytes, num: int
) -> None:
    limits = Limits(json_depth=64)
    for raw in (unit * num, b'{"messages": [], "x": ' + unit * num):
        assert "nested deeper than 64 levels" in refusal_of(raw, limits).message


@pytest.mark.parametrize(("body", "param"), TOO_MUCH)
def test_a_field_beyond_its_limit_is_a_400_with_its_name_and_a_short_message(
    body: dict[str, Any], param: str
) -> None:
    error = refusal_of(orjson.dumps(body) if body.get("n") != 2**70 else json.dumps(body).encode())
    assert error.status == 400 and error.body["error"]["type"] == "BadRequestError"
    assert error.body["error"]["param"] == param and param in error.message
    assert len(error.message) < 120


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 100))
def test_choices_times_siblings_are_limited_and_one_choice_is_always_allowed(
    n: int, num_siblings: int, most: int
) -> None:
    refusal = Limits(num_choices=most).body_refusal({"n": n}, num_siblings)
    assert (refusal is None) is (n == 1 or n * num_siblings <= most)


def test_headers_have_a_maximum_number_and_size() -> None:
    assert LIMITS.headers_refusal([(b"a", b"b")] * 256) is None
    assert LIMITS.headers_refusal([(b"a", b"x" * (2**16 - 1))]) is None
    for headers in ([(b"a", b"b")] * 257, [(b"a", b"x" * 2**16)]):
        refusal = LIMITS.headers_refusal(headers)
        assert refusal is not None and refusal.status == 400
        assert refusal.body["error"]["type"] == "Bad Request"


@pytest.mark.parametrize("name", [b"host", b"authorization", b"x-api-key", b"content-length"])
def test_a_repeated_single_header_is_refused_by_its_name(name: bytes) -> None:
    assert LIMITS.headers_refusal([(name, b"a"), (b"accept", b"b"), (b"accept", b"c")]) is None
    refusal = LIMITS.headers_refusal([(name, b"a"), (b"accept", b"b"), (name, b"a")])
    assert refusal is not None and refusal.status == 400
    assert f"more than one `{name.decode()}` header" in refusal.message
