"""Which siblings share a call to the engine, and with which body."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.transport.request import Request, SiblingPlan, sibling_headers
from fakevllm_adapters.formats.base import EngineInfo
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.protocol.swarm import SIBLING_HEADER

Json = dict[str, Any]

TOOLS: Json = {"tools": [{"type": "function", "function": {"name": "add"}}]}


def request_of(fields: Json, headers: dict[str, str] | None = None) -> Request:
    body: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    adapter, raw = ADAPTERS["chat"], orjson.dumps(body)
    return Request("r", adapter, raw, raw, adapter.open(body, EngineInfo()), headers or {})


def calls(plan: SiblingPlan, fields: Json | None = None, max_per_call: int = 99) -> list[Any]:
    return plan.calls(request_of(fields or {}), range(plan.num), 1.0, max_per_call)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": True},
        {"stream": True} | TOOLS,
        {"stream": True, "add_generation_prompt": False, "return_tokens_as_token_ids": True},
        {"add_generation_prompt": True, "return_tokens_as_token_ids": False},
        TOOLS | {"tool_choice": "none"},
        {"seed": 5},
        {"logprobs": True, "stop": ["x"], "response_format": {"type": "json_object"}},
    ],
    ids=str,
)
def test_siblings_with_equal_bodies_share_a_call(fields: Json) -> None:
    assert calls(SiblingPlan(4), fields) == [(0,), (1, 2, 3)]


@pytest.mark.parametrize(
    "fields",
    [
        TOOLS,
        TOOLS | {"tool_choice": "required"},
        {"add_generation_prompt": False},
        {"return_tokens_as_token_ids": True},
        {"seed": -5},
        {"seed": 2**63 - 2},
        {"stream": 1},
        {"stream": 0},
        {"stream": "yes"},
    ],
    ids=str,
)
def test_siblings_whose_answers_would_differ_in_a_shared_call_have_their_own(fields: Json) -> None:
    assert calls(SiblingPlan(3), fields) == [(0,), (1,), (2,)]


def test_greedy_siblings_have_calls_of_their_own() -> None:
    assert SiblingPlan(3).calls(request_of({}), range(3), 0.0, 99) == [(0,), (1,), (2,)]


def test_only_neighbours_with_equal_overrides_share_a_call() -> None:
    warm, cold = {"temperature": 1.2}, {"temperature": 0.5}
    plan = SiblingPlan(7, [{}, warm, warm, cold, warm, warm, {}])
    assert calls(plan) == [(0,), (1, 2), (3,), (4, 5), (6,)]
    assert calls(SiblingPlan(3, [{}, {"seed": 1}, {"seed": 1}])) == [(0,), (1,), (2,)]


def test_a_call_has_no_more_siblings_than_there_are_slots() -> None:
    assert calls(SiblingPlan(6), max_per_call=2) == [(0,), (1, 2), (3, 4), (5,)]
    assert calls(SiblingPlan(3), max_per_call=1) == [(0,), (1,), (2,)]


@given(st.integers(2, 40), st.integers(1, 10), st.booleans())
def test_each_sibling_is_in_one_call(num: int, max_per_call: int, streamed: bool) -> None:
    planned = calls(SiblingPlan(num), {"stream": streamed}, max_per_call)
    assert [index for call in planned for index in call] == list(range(num))
    assert planned[0] == (0,) and all(len(call) <= max_per_call for call in planned)


def test_a_shared_body_is_that_of_the_first_sibling_with_their_number() -> None:
    request = request_of({"seed": 5, "request_id": "mine", "top_p": 0.5})
    plan = SiblingPlan(4)
    shared = orjson.loads(plan.shared_body(request, (1, 2, 3), 1.0))
    assert shared == orjson.loads(plan.body(request, 1, 1.0)) | {"n": 3}
    assert (shared["seed"], shared["request_id"]) == (6, "mine-1")


def test_the_headers_of_a_shared_call_name_the_range() -> None:
    headers = sibling_headers(request_of({}, {"X-Request-Id": "mine"}), 1, 3)
    assert headers == {SIBLING_HEADER: "r/1-3", "X-Request-Id": "mine-1"}
