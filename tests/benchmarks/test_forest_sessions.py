"""The calls that benchmarks.forest trains on: merging and shortening lose no trained token."""

from __future__ import annotations

from benchmarks.forest_parts.cases import Shape, merge_extending_calls
from benchmarks.forest_parts.recorded_sessions import (
    RecordedCall,
    shorten_prompts,
    with_answers,
    with_siblings,
)
from benchmarks.recorded_traffic import expand_lines
from fakevllm_server.forest import CallTokens

END = 2


def trained_tokens(calls: list[CallTokens]) -> list[list[int]]:
    """Return the tokens of every trained span, sorted."""
    return sorted(list(call.ids)[start:end] for call in calls for start, end in call.trained)


def test_a_call_that_extends_another_is_merged_into_its_row() -> None:
    calls = [CallTokens.of([1, 3], [4]), CallTokens.of([1, 3, 4, 5], [6, 7])]
    (row,) = merge_extending_calls(calls)
    assert list(row.ids) == [1, 3, 4, 5, 6, 7]
    assert list(row.trained) == [(2, 3), (4, 6)]


def test_siblings_equal_calls_and_forks_are_not_merged() -> None:
    first = CallTokens.of([1], [4])
    fork = CallTokens.of([1, 4, 8], [9])
    calls = [first, first, CallTokens.of([1], [5]), CallTokens.of([1, 4, 7], [9]), fork, fork]
    rows = merge_extending_calls(calls)
    assert trained_tokens(rows) == trained_tokens(calls)
    assert len(rows) == 4


def test_merging_a_session_of_several_turns_keeps_every_trained_token() -> None:
    case = Shape(6, 3, siblings=4, turns=5, observed=2).create_case()
    rows = merge_extending_calls(case.calls)
    assert trained_tokens(rows) == trained_tokens(list(case.calls))
    assert len(rows) == len(case.calls) - 4


def test_the_first_siblings_are_one_call_per_turn() -> None:
    case = Shape(6, 3, siblings=4, turns=5, observed=2).create_case()
    first = case.first_siblings()
    assert len(first.calls) == 5
    assert len(merge_extending_calls(first.calls)) == 1


def test_a_value_that_a_recording_holds_once_is_put_back_everywhere() -> None:
    lines = ['{"a": [{"$id": "x", "value": {"b": 1}}]}', '{"a": {"$same_as": "x"}, "c": null}']
    assert expand_lines(lines) == [{"a": [{"b": 1}]}, {"a": {"b": 1}, "c": None}]


def test_an_answer_is_read_from_the_next_request_of_the_session() -> None:
    request = [9, END, 5]
    next_request = [*request, 6, 7, END, 8, END, 5]
    side_call = [9, 9, END, 5]
    calls = with_answers([request, side_call, next_request], END)
    assert [call.answer for call in calls] == [[6, 7, END], None, None]


def test_shortening_cuts_equal_first_messages_equally() -> None:
    system = [1, *range(10, 30)]
    first = [*system, END, 40, END]
    second = [*first, 41, END, 42, END]
    session = with_answers([first, second, [*system, END, 60], [1, 50, END, 51]], END)
    cut = shorten_prompts(session, 15, END)
    assert [len(call.prompt) for call in cut] == [11, 15, 10, 4]
    assert cut[1].prompt[: len(cut[0].prompt)] == cut[0].prompt
    assert cut[0].prompt == [*system[:8], END, 40, END]
    assert [call.answer for call in cut] == [call.answer for call in session]


def test_added_siblings_are_as_long_as_the_recorded_answer() -> None:
    session = [RecordedCall([1, 2], [3, 4, END]), RecordedCall([1, 5], None)]
    case = with_siblings("name", session, budget=64)
    assert len(case.calls) == 2 * case.num_siblings
    assert list(case.calls[0].ids) == [1, 2, 3, 4, END]
    assert {len(call.ids) for call in case.calls} == {5}
    assert len({tuple(call.ids) for call in case.calls}) == len(case.calls)
