"""What benchmarks.forest trains on: nothing that was sampled may get lost on the way there."""

from __future__ import annotations

from benchmarks.forest_parts.cases import Shape, timelines
from benchmarks.forest_parts.recorded_sessions import Recorded, cut_to, with_answers, with_siblings
from benchmarks.recorded_traffic import expand_lines
from fakevllm_server.forest import CallTokens

END = 2


def trained(calls: list[CallTokens]) -> list[list[int]]:
    """The tokens of every span, sorted."""
    return sorted(list(call.ids)[start:end] for call in calls for start, end in call.trained)


def test_a_call_that_extends_another_is_trained_in_its_row() -> None:
    calls = [CallTokens.of([1, 3], [4]), CallTokens.of([1, 3, 4, 5], [6, 7])]
    (row,) = timelines(calls)
    assert list(row.ids) == [1, 3, 4, 5, 6, 7]
    assert list(row.trained) == [(2, 3), (4, 6)]


def test_siblings_twins_and_forks_stay_rows_of_their_own() -> None:
    first = CallTokens.of([1], [4])
    fork = CallTokens.of([1, 4, 8], [9])
    calls = [first, first, CallTokens.of([1], [5]), CallTokens.of([1, 4, 7], [9]), fork, fork]
    rows = timelines(calls)
    assert trained(rows) == trained(calls)
    assert len(rows) == 4


def test_merging_a_session_in_turns_keeps_every_trained_token() -> None:
    case = Shape(6, 3, siblings=4, turns=5, observed=2).case()
    rows = timelines(case.calls)
    assert trained(rows) == trained(list(case.calls))
    assert len(rows) == len(case.calls) - 4


def test_the_first_siblings_are_one_call_a_turn() -> None:
    case = Shape(6, 3, siblings=4, turns=5, observed=2).case()
    alone = case.first_siblings()
    assert len(alone.calls) == 5
    assert len(timelines(alone.calls)) == 1


def test_what_a_recording_holds_once_is_put_back_wherever_it_came() -> None:
    lines = ['{"a": [{"$id": "x", "value": {"b": 1}}]}', '{"a": {"$same_as": "x"}, "c": null}']
    assert expand_lines(lines) == [{"a": [{"b": 1}]}, {"a": {"b": 1}, "c": None}]


def test_an_answer_is_read_off_the_next_request_that_goes_on() -> None:
    asked = [9, END, 5]
    next_request = [*asked, 6, 7, END, 8, END, 5]
    side_call = [9, 9, END, 5]
    told = with_answers([asked, side_call, next_request], END)
    assert [one.answer for one in told] == [[6, 7, END], None, None]


def test_a_bound_shortens_the_first_message_of_all_calls_alike() -> None:
    system = [1, *range(10, 30)]
    first = [*system, END, 40, END]
    second = [*first, 41, END, 42, END]
    session = with_answers([first, second, [*system, END, 60], [1, 50, END, 51]], END)
    cut = cut_to(session, 15, END)
    assert [len(one.prompt) for one in cut] == [11, 15, 10, 4]
    assert cut[1].prompt[: len(cut[0].prompt)] == cut[0].prompt
    assert cut[0].prompt == [*system[:8], END, 40, END]
    assert [one.answer for one in cut] == [one.answer for one in session]


def test_made_up_siblings_are_as_long_as_the_recorded_answer() -> None:
    session = [Recorded([1, 2], [3, 4, END]), Recorded([1, 5], None)]
    case = with_siblings("name", session, budget=64)
    assert len(case.calls) == 2 * case.num_siblings
    assert list(case.calls[0].ids) == [1, 2, 3, 4, END]
    assert {len(call.ids) for call in case.calls} == {5}
    assert len({tuple(call.ids) for call in case.calls}) == len(case.calls)
