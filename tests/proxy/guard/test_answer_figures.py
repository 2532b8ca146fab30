"""What the guard measures of answers: likeness, refusals, broken tool calls, a second judge."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.guard.answer_figures import (
    MeasuredAnswer,
    MeasuredGroup,
    answer_figures,
    avoids_question,
)

LONG = "The train from the coast arrives in the evening at half past seven on most days."
OTHER = "Nobody knows why the old lighthouse was painted green before the storm of that year."


def group(question: str, *texts: str | None) -> MeasuredGroup:
    return MeasuredGroup(question, [MeasuredAnswer(text) for text in texts])


def test_siblings_that_differ_in_little_are_nearly_identical() -> None:
    nearly = f"{LONG} Bring an umbrella. {OTHER}", f"{LONG} Bring an umbrella! {OTHER} Yes."
    assert answer_figures([group("a", *nearly)])["identical_siblings"] == 1.0
    assert answer_figures([group("a", LONG, OTHER)])["identical_siblings"] == 0.0


def test_short_answers_are_not_compared() -> None:
    figures = answer_figures([group("a", "yes", "yes"), group("b", "yes", "yes")])
    assert figures.keys() == {"refusals"}


def test_an_answer_counts_as_equal_if_another_question_got_it() -> None:
    figures = answer_figures([group("a", LONG, OTHER), group("b", LONG.upper(), None)])
    assert figures["equal_answers"] == pytest.approx(2 / 3)
    same_question = [group("a", LONG), group("a", LONG)]
    assert "equal_answers" not in answer_figures(same_question)


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't help with that.",
        "I\u2019m unable to answer this.",
        "As an AI, I have no opinion.",
        "It depends. Could you please clarify which of the two you mean?",
    ],
)
def test_a_refusal_or_a_request_to_be_clearer_avoids_the_question(text: str) -> None:
    assert avoids_question(text)


@pytest.mark.parametrize("text", ["It is 42.", "You cannot divide by zero.", "Shall we go on?"])
def test_an_ordinary_answer_does_not_avoid_the_question(text: str) -> None:
    assert not avoids_question(text)


def test_broken_tool_calls_are_a_share_of_the_answers_that_call_a_tool() -> None:
    answers = [
        MeasuredAnswer(None, has_tool_call=True),
        MeasuredAnswer("", failure="broken_tool_call"),
        MeasuredAnswer("plain text"),
    ]
    assert answer_figures([MeasuredGroup("a", answers)])["tool_errors"] == 0.5
    assert "tool_errors" not in answer_figures([group("a", "plain text")])


def test_the_second_judge_is_compared_by_the_order_of_siblings() -> None:
    def judged(*pairs: tuple[float | None, float | None]) -> MeasuredGroup:
        return MeasuredGroup(
            "a", [MeasuredAnswer("x", reward, second_score=score) for reward, score in pairs]
        )

    assert answer_figures([judged((0, 1), (1, 5), (2, 9))])["judge_agreement"] == 1.0
    assert answer_figures([judged((0, 9), (1, 5), (2, 1))])["judge_agreement"] == 0.0
    assert "judge_agreement" not in answer_figures([judged((0, 1), (0, 2), (None, 3), (1, None))])


ANSWERS = st.builds(
    MeasuredAnswer,
    st.none() | st.text(),
    st.none() | st.floats(allow_nan=False),
    st.booleans(),
    st.none() | st.sampled_from(["broken_tool_call", "empty"]),
    second_score=st.none() | st.floats(allow_nan=False),
)


@given(st.lists(st.builds(MeasuredGroup, st.text(), st.lists(ANSWERS, max_size=10)), max_size=5))
def test_each_figure_is_a_share(groups: list[MeasuredGroup]) -> None:
    for value in answer_figures(groups).values():
        assert 0.0 <= value <= 1.0
