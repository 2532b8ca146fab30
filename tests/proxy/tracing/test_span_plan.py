"""Tests of the spans that are made of a request that has ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from fakevllm.tracing.message_parts import MAX_CONTENT_CHARS
from fakevllm.tracing.request_trace import FinishedTrace, HookTrace
from fakevllm.tracing.span_plan import Kind, PlannedSpan, RequestSpans, SpanPlanner, Upstream
from tests.proxy.tracing.finished_traces import PARENT, QUESTION, call, record, sibling, trace

ENGINE = Upstream("gpu-box", 10086)
FALLBACK = Upstream("other.example", 443)


def spans_of(ended: FinishedTrace, *, with_content: bool = False) -> RequestSpans:
    return SpanPlanner(ENGINE, FALLBACK, with_content=with_content).spans(ended)


def calls_of(ended: FinishedTrace, *, with_content: bool = False) -> list[PlannedSpan]:
    children = spans_of(ended, with_content=with_content).children
    return [span for span in children if span.kind is Kind.CLIENT]


def test_a_group_has_a_span_for_the_request_one_for_each_sibling_and_one_for_each_hook_call() -> (
    None
):
    spans = spans_of(trace())
    assert (spans.request.name, spans.request.kind) == ("chat gpt-4o", Kind.SERVER)
    assert [(span.name, span.kind.value) for span in spans.children] == [
        ("chat demo", "CLIENT"),
        ("chat demo", "CLIENT"),
        ("chat demo", "CLIENT"),
        ("on_compute_relative_reward", "INTERNAL"),
    ]
    assert spans.parent == {"traceparent": PARENT}
    assert not any(span.is_error for span in (spans.request, *spans.children))


def test_the_request_s_span_has_what_the_app_asked_for_and_got() -> None:
    span = spans_of(trace()).request
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "fakevllm",
        "gen_ai.request.model": "gpt-4o",
        "gen_ai.request.temperature": 0.2,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.seed": 5,
        "gen_ai.request.stream": False,
        "gen_ai.conversation.id": "s1",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "demo",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 4,
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "fakevllm.group.id": "g1",
        "fakevllm.group.state": "scored",
        "fakevllm.group.num_siblings": 3,
        "fakevllm.served.index": 1,
        "fakevllm.served.by": "best",
        "fakevllm.served.propensity": 1.0,
        "fakevllm.best.index": 1,
        "fakevllm.reward": 0.5,
        "fakevllm.session.turn": 2,
        "fakevllm.request.kind": "turn",
        "fakevllm.weight_version": "4",
    }


def test_the_span_of_a_sibling_has_its_own_sampling_reward_and_server() -> None:
    attributes = calls_of(trace())[2].attributes
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "fakevllm",
        "gen_ai.request.model": "demo",
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": "chatcmpl-2",
        "gen_ai.response.model": "demo",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "server.address": "gpu-box",
        "server.port": 10086,
        "http.response.status_code": 200,
        "fakevllm.group.id": "g1",
        "fakevllm.sibling.index": 2,
        "fakevllm.sibling.served": False,
        "fakevllm.sibling.best": False,
        "fakevllm.sibling.reward": 1.0,
        "fakevllm.call.attempts": 1,
        "fakevllm.call.num_siblings": 2,
        "fakevllm.weight_version": "4",
    }


def test_the_request_s_span_ends_with_the_answer_and_later_calls_have_their_own_end() -> None:
    late = call(2, ended_ns=690)
    spans = spans_of(trace(calls=(call(0), late)))
    assert (spans.request.started_ns, spans.request.ended_ns) == (90, 650)
    assert spans.children[1].ended_ns == 690


def test_a_call_that_was_cancelled_ends_with_the_group_as_an_error() -> None:
    open_call = call(2, ended_ns=None, status=None, answer=None)
    unanswered = sibling(2, message_json=None, text=None, status=499, reward=None)
    siblings = [sibling(0), sibling(1), unanswered]
    cancelled = calls_of(trace(calls=(open_call,), record=record(siblings=siblings)))[0]
    assert cancelled.ended_ns == 700 and cancelled.is_error
    assert cancelled.attributes["error.type"] == "cancelled"


@pytest.mark.parametrize(
    ("fields", "own", "error"),
    [
        ({"status": 429, "answer": None}, {"message_json": None}, "429"),
        ({"answer": None}, {"message_json": None}, "no_answer"),
        ({}, {"failure": "broken_off"}, "broken_off"),
        ({}, {"failure": "cut_off"}, None),
    ],
)
def test_the_error_of_a_call_is_its_status_or_what_is_wrong_with_the_answer(
    fields: dict[str, Any], own: dict[str, Any], error: str | None
) -> None:
    ended = trace(calls=(call(2, **fields),), record=record(siblings=[sibling(2, **own)]))
    span = calls_of(ended)[0]
    assert span.attributes.get("error.type") == error
    assert span.is_error is (error is not None)


def test_a_request_that_failed_names_the_first_word_of_the_reason_only() -> None:
    reason = "not_translated: the field my_secret"
    failed = record(state="failed", reason=reason, status=503, siblings=[], served_index=None)
    spans = spans_of(trace(record=failed, calls=(call(0, status=None, ended_ns=None),)))
    assert spans.request.is_error
    assert spans.request.attributes["error.type"] == "not_translated"
    assert spans.children[0].attributes["error.type"] == "not_translated"
    assert "my_secret" not in str(spans)


@pytest.mark.parametrize("status", [400, 404, 499])
def test_a_mistake_of_the_client_has_a_type_and_is_no_error_of_the_proxy(status: int) -> None:
    failed = record(state="failed", reason=f"upstream_{status}", status=status, siblings=[])
    span = spans_of(trace(record=failed)).request
    assert span.attributes["error.type"] == f"upstream_{status}" and not span.is_error


def test_a_hook_that_raised_has_an_error_without_its_text() -> None:
    hook = HookTrace(
        "on_compute_relative_reward", 520, 600, "hook_raised: ValueError: secret", "abc"
    )
    span = spans_of(trace(calls=(), hooks=(hook,))).children[0]
    assert span.is_error
    assert span.attributes == {
        "fakevllm.group.id": "g1",
        "fakevllm.hook.name": "on_compute_relative_reward",
        "fakevllm.hook.hash": "abc",
        "error.type": "hook_raised",
    }


def test_the_fallback_s_answer_belongs_to_the_call_to_the_fallback_server() -> None:
    engine = call(0, status=503, answer=None, num_attempts=9)
    fallback = call(0, is_fallback=True, started_ns=550, ended_ns=600, answer=None)
    row = sibling(0, served=True, best=False, reward=None)
    reason = "fallback: engine_not_ready"
    served = record(state="served", reason=reason, siblings=[row], served_index=0)
    first, second = calls_of(trace(calls=(engine, fallback), record=served, hooks=()))
    assert first.attributes["error.type"] == "503"
    assert first.attributes["fakevllm.call.attempts"] == 9
    assert "gen_ai.usage.output_tokens" not in first.attributes
    assert not second.is_error and second.attributes["fakevllm.fallback"] is True
    assert second.attributes["server.address"] == "other.example"
    assert second.attributes["gen_ai.usage.output_tokens"] == 3


def test_an_answer_that_the_proxy_does_not_parse_is_no_error() -> None:
    row = sibling(0, served=True, message_json=None, text=None, finish_reason=None)
    served = record(state="served", reason="not_translated: n", siblings=[row], served_index=0)
    span = calls_of(trace(calls=(call(0, answer=None, sampling={}),), record=served))[0]
    assert not span.is_error and span.name == "chat gpt-4o"


def test_a_completion_is_named_as_the_conventions_name_it() -> None:
    facts = replace(trace().facts, is_text_completion=True, messages="Once upon")
    span = spans_of(trace(facts=facts), with_content=True).request
    assert span.name == "text_completion gpt-4o"
    assert "Once upon" in str(span.attributes["gen_ai.input.messages"])


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": "hot", "seed": 1.5, "max_tokens": True, "top_p": None},
        {"seed": 2**70, "n": "three", "top_k": [1]},
    ],
)
def test_sampling_fields_of_a_wrong_type_are_left_out(sampling: dict[str, Any]) -> None:
    facts = replace(trace().facts, sampling=sampling)
    attributes = spans_of(trace(facts=facts)).request.attributes
    names = {name for name in attributes if name.startswith("gen_ai.request.")}
    assert names == {"gen_ai.request.model", "gen_ai.request.stream"}


def test_no_span_has_a_text_of_the_request_or_an_answer_unless_content_is_asked_for() -> None:
    assert QUESTION not in str(spans_of(trace()))
    assert "answer 1" not in str(spans_of(trace()))
    spans = spans_of(trace(), with_content=True)
    asked = orjson.loads(str(spans.request.attributes["gen_ai.input.messages"]))
    assert asked == [{"role": "user", "parts": [{"type": "text", "content": QUESTION}]}]
    got = orjson.loads(str(spans.request.attributes["gen_ai.output.messages"]))
    part = {"type": "text", "content": "answer 1"}
    assert got == [{"role": "assistant", "parts": [part], "finish_reason": "stop"}]
    second = calls_of(trace(), with_content=True)[2]
    assert "answer 2" in str(second.attributes["gen_ai.output.messages"])


def test_content_that_is_too_long_is_left_out_and_the_span_says_so() -> None:
    messages = [{"role": "user", "content": "x" * MAX_CONTENT_CHARS}]
    facts = replace(trace().facts, messages=messages)
    attributes = spans_of(trace(facts=facts), with_content=True).request.attributes
    assert "gen_ai.input.messages" not in attributes
    assert attributes["fakevllm.content.too_long"] is True
