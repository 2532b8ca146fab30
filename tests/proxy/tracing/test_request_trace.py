"""Tests of the notes that are taken while a request is answered."""

from __future__ import annotations

from itertools import count

from fakevllm.tracing.request_trace import (
    FinishedTrace,
    RequestFacts,
    RequestTrace,
    sampling_fields,
)
from fakevllm_adapters.formats.base import Answer
from tests.proxy.tracing.finished_traces import record

ANSWER = Answer({}, "stop")


def begun() -> tuple[RequestTrace, list[FinishedTrace]]:
    finished: list[FinishedTrace] = []
    clock = count(1)
    return RequestTrace(RequestFacts("m", {}), finished.append, lambda: next(clock)), finished


def test_a_call_that_is_repeated_is_one_call_from_its_first_attempt_to_its_answer() -> None:
    trace, finished = begun()
    trace.begin_call(0, {})
    trace.end_call(0, 503, None, None)
    trace.begin_call(0, {})
    trace.end_call(0, 200, ANSWER, "3")
    trace.finish(record())
    [call] = finished[0].calls
    assert (call.started_ns, call.ended_ns, call.num_attempts) == (2, 4, 2)
    assert (call.status, call.answer, call.weight_version) == (200, ANSWER, "3")


def test_calls_that_end_after_the_group_do_not_change_the_notes() -> None:
    trace, finished = begun()
    trace.begin_call(1, {}, 2)
    hook = trace.begin_hook("on_compute_relative_reward")
    trace.finish(record())
    trace.end_call(1, 200, ANSWER, None)
    trace.end_hook(hook, None, "abc")
    assert finished[0].calls[0].ended_ns is None and finished[0].hooks[0].ended_ns is None
    assert finished[0].answered_ns == finished[0].ended_ns == 4


def test_the_time_of_the_answer_is_that_of_the_first_call() -> None:
    trace, finished = begun()
    trace.mark_answered()
    trace.mark_answered()
    trace.finish(record())
    assert (finished[0].answered_ns, finished[0].ended_ns) == (2, 3)


def test_a_sibling_that_failed_before_its_call_began_has_no_call() -> None:
    trace, finished = begun()
    trace.end_call(3, 503, None, None)
    trace.finish(record())
    assert finished[0].calls == ()


def test_the_fallback_is_a_further_call() -> None:
    trace, finished = begun()
    trace.begin_call(0, {})
    trace.begin_fallback()
    trace.end_fallback(200)
    trace.finish(record())
    engine, fallback = finished[0].calls
    assert engine.ended_ns is None and not engine.is_fallback
    assert (fallback.is_fallback, fallback.status, fallback.ended_ns) == (True, 200, 4)


def test_only_fields_without_texts_are_noted() -> None:
    body = {"model": "m", "seed": 0, "temperature": None, "messages": [], "stop": ["x"]}
    assert sampling_fields(body) == {"model": "m", "seed": 0}


def test_without_a_clock_the_times_are_unix_times() -> None:
    finished: list[FinishedTrace] = []
    trace = RequestTrace(RequestFacts("m", {}), finished.append)
    trace.finish(record())
    assert 1.7e18 < finished[0].started_ns <= finished[0].ended_ns
