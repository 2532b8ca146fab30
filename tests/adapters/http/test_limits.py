"""What one request may ask for, and how many at a time."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakevllm_adapters.http.asgi import engine_headers
from fakevllm_adapters.http.limits import (
    NOT_FOR_CLIENTS,
    Admitted,
    Limits,
    OpenCalls,
    admitted,
    is_deeper,
    rewritten,
    stripped,
)
from fakevllm_adapters.protocol.errors import Json, WireError
from fakevllm_adapters.protocol.swarm import SIBLING_HEADER

LIMITS = Limits()
TEXTS = st.text(st.sampled_from('[]{}"\\/é\ud83d😀a\n\0'), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=30,
)

TOO_MUCH: list[tuple[Json, str]] = [
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
]
FINE: list[Json] = [
    {"n": 64, "stop": ["x" * 1000] * 64, "bad_words": ["x"] * 256, "tools": [{}] * 512},
    {"n": None, "stop": None, "tools": None, "logit_bias": None},
    {"n": "many", "stop": 5, "tools": "x" * 9999, "bad_words": {}, "logit_bias": []},
    {"n": [1, 2], "stop": [None, 5, ["x" * 2000]]},
    {"n": -1},
    {},
]


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    return 0


def refused(raw: bytes, limits: Limits = LIMITS, num_siblings: int = 1) -> WireError:
    with pytest.raises(WireError) as refusal:
        admitted(raw, limits, num_siblings)
    assert refusal.value.body["error"].keys() == {"message", "type", "param", "code"}
    assert refusal.value.body["error"]["code"] == refusal.value.status
    return refusal.value


@given(VALUES, st.booleans(), st.sampled_from([None, 2]), st.integers(0, 8))
def test_depth_is_that_of_the_parsed_value_however_it_is_written(
    value: Any, is_ascii: bool, indent: int | None, most: int
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    raw = text.encode("utf-8", "surrogatepass")
    assert is_deeper(raw, most) is (depth(value) > most)


@given(VALUES, st.sampled_from(["utf-16", "utf-16-be", "utf-32", "utf-8-sig"]), st.integers(0, 4))
def test_no_encoding_that_json_reads_hides_depth(value: Any, encoding: str, most: int) -> None:
    raw = json.dumps(value).encode(encoding)
    assert json.loads(raw) == value
    assert is_deeper(raw, most) or depth(value) <= most


@given(st.binary(max_size=60) | st.text('[]{}"\\a', max_size=60).map(str.encode))
def test_whatever_bytes_come_they_are_admitted_or_refused(raw: bytes) -> None:
    try:
        result = admitted(raw, Limits(json_depth=3))
    except WireError as error:
        assert error.status == 400
    else:
        assert result.raw == raw or result.removed


@pytest.mark.parametrize("unit", [b"[", b'{"a":', b'[{"a":', b'["]",'])
@pytest.mark.parametrize("num", [65, 1024, 100_000])
def test_json_that_is_too_deep_is_a_400_whether_it_ends_or_not(unit: bytes, num: int) -> None:
    limits = Limits(json_depth=64)
    for raw in (unit * num, b'{"messages": [], "x": ' + unit * num):
        assert "nested deeper than 64 levels" in refused(raw, limits).message


def test_what_is_let_through_can_be_written_again() -> None:
    value: Any = 1
    for _ in range(200):  # the most the configuration allows
        value = [value]
    body = admitted(orjson.dumps({"x": value}), Limits(json_depth=201)).body
    assert orjson.loads(orjson.dumps(body)) == {"x": value}


@pytest.mark.parametrize(("body", "param"), TOO_MUCH)
def test_what_asks_for_too_much_is_a_400_that_names_the_field_and_echoes_little(
    body: dict[str, Any], param: str
) -> None:
    error = refused(orjson.dumps(body) if body.get("n") != 2**70 else json.dumps(body).encode())
    assert error.status == 400 and error.body["error"]["type"] == "BadRequestError"
    assert error.body["error"]["param"] == param and param in error.message
    assert len(error.message) < 120


@pytest.mark.parametrize("body", FINE)
def test_what_is_within_the_limits_or_wrongly_typed_is_left_to_the_engine(
    body: dict[str, Any],
) -> None:
    raw = orjson.dumps(body)
    assert admitted(raw, LIMITS) == Admitted(raw, body, ())


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 100))
def test_choices_times_siblings_stay_within_the_limit_and_one_choice_always_may(
    n: int, num_siblings: int, most: int
) -> None:
    refusal = Limits(num_choices=most).body_refusal({"n": n}, num_siblings)
    assert (refusal is None) is (n == 1 or n * num_siblings <= most)


@given(VALUES, st.sets(st.sampled_from(sorted(NOT_FOR_CLIENTS)), max_size=3))
def test_fields_that_are_not_for_clients_go_and_nothing_else(value: Any, names: set[str]) -> None:
    body = {"model": "m", "x": value, **{name: {"a": 1} for name in names}, "messages": [value]}
    kept, removed = stripped(body)
    assert set(removed) == names
    assert kept == {"model": "m", "x": value, "messages": [value]}
    assert list(kept) == [name for name in body if name not in names]
    assert stripped(body, allowed=names) == (body, ())


def test_a_body_without_them_goes_on_as_the_very_bytes_that_came() -> None:
    raw = b'{ "model":"m",  "x": 1.10, "x": 1e5 }'
    assert admitted(raw, LIMITS).raw is raw
    taken = admitted(b'{"a":1,"kv_transfer_params":{"b":2},"c":"\xc3\xa9"}', LIMITS)
    assert taken.raw == '{"a":1,"c":"é"}'.encode() and taken.removed == ("kv_transfer_params",)
    assert admitted(b'{"vllm_xargs":{}}', LIMITS, allowed=["vllm_xargs"]).removed == ()


def test_numbers_keep_their_digits_where_another_field_is_taken_out() -> None:
    raw = b'{"vllm_xargs":{},"seed":-9223372036854780917,"x":[100000000000000000000000,1e-5,-0.0]}'
    kept = admitted(raw, LIMITS).raw
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
def test_what_only_a_looser_reader_reads_carries_nothing_past_us_either(raw: bytes) -> None:
    result = admitted(raw, LIMITS)
    assert result.body is None and result.removed == ("kv_transfer_params",)
    kept, sent = json.loads(result.raw), json.loads(raw)
    del sent["kv_transfer_params"]
    assert repr(kept) == repr(sent) and kept["x"] == 2


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{", b'"x"', b'{"a":NaN}', b"\xff\xfe\xff", b"null"])
def test_what_is_no_object_goes_on_as_it_came(raw: bytes) -> None:
    assert admitted(raw, LIMITS) == Admitted(raw, None, ())


def test_headers_that_steer_an_engine_do_not_reach_it() -> None:
    steering = [
        *("X-data-parallel-rank", "X-Vllm-Priority", "X-Session-ID", SIBLING_HEADER),
        *("endpoint-load-metrics-format", "Authorization", "x-api-key", "Cookie", "Host"),
        *("Connection", "Transfer-Encoding", "Forwarded", "X-Forwarded-For", "Expect"),
    ]
    headers = {name.lower().encode(): b"1" for name in steering}
    assert engine_headers(headers) == {}
    headers |= {b"content-type": b"application/json", b"x-request-id": b"r"}
    assert engine_headers(headers) == {"Content-Type": "application/json", "X-Request-Id": "r"}


def test_headers_are_counted_and_weighed() -> None:
    assert LIMITS.headers_refusal([(b"a", b"b")] * 256) is None
    assert LIMITS.headers_refusal([(b"a", b"x" * (2**16 - 1))]) is None
    for headers in ([(b"a", b"b")] * 257, [(b"a", b"x" * 2**16)]):
        refusal = LIMITS.headers_refusal(headers)
        assert refusal is not None and refusal.status == 400
        assert refusal.body["error"]["type"] == "Bad Request"


def test_calls_over_the_limits_are_a_429_to_be_tried_again_soon() -> None:
    calls = OpenCalls(most=3, most_per_key=2)
    assert calls.enter("a") is None and calls.enter("a") is None
    own = calls.enter("a")
    assert own is not None and (own.status, own.retry_after_s) == (429, 2)
    assert "This key has 2 requests open" in own.message
    assert calls.enter(None) is None
    every = calls.enter("b")
    assert every is not None and every.status == 429 and "3 requests are open" in every.message
    calls.leave("a")
    assert calls.enter("b") is None


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from(["a", "b", None]))),
    st.integers(0, 4),
    st.integers(0, 3),
)
def test_the_counts_are_those_of_the_calls_that_are_open(
    moves: list[tuple[bool, str | None]], most: int, per_key: int
) -> None:
    calls = OpenCalls(most, per_key)
    opened: list[str | None] = []
    for is_entering, key in moves:
        if is_entering:
            is_full = (0 < most <= len(opened)) or (0 < per_key <= opened.count(key))
            assert (calls.enter(key) is not None) is is_full
            opened += [] if is_full else [key]
        elif key in opened:
            opened.remove(key)
            calls.leave(key)
        assert calls.num == len(opened)


def test_a_body_written_anew_keeps_its_numbers_and_its_words() -> None:
    raw = b'{"model": "a", "seed": 99999999999999999999, "text": "\\u00e9"}'
    told = json.loads(rewritten(raw, without=["text"], model="b"))
    assert told == {"model": "b", "seed": 99999999999999999999}
    assert rewritten(raw, model="b").endswith('"text":"é"}'.encode())
