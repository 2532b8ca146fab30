"""The hook length_format: the format is a gate, and above-median length costs a little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fakevllm.hooks.spec import Sibling, Task
from reward_hooks.length_format import LENGTH_CAP, on_compute_relative_reward


def rewards(answers: Sequence[tuple[str, int | None, str]]) -> list[float | None]:
    """Return the rewards of answers that are (text, number of tokens, finish reason)."""
    messages: list[dict[str, Any]] = [
        {"content": text, "finish_reason": finish} for text, _, finish in answers
    ]
    siblings = [
        Sibling(
            i, Task(), f"g/{i}", finish, {} if tokens is None else {"completion_tokens": tokens}
        )
        for i, (_, tokens, finish) in enumerate(answers)
    ]
    return on_compute_relative_reward(siblings, messages, "q")


def test_only_answers_longer_than_the_passing_median_are_penalized() -> None:
    good = "Answer: 42"
    answers = [(good, tokens, "stop") for tokens in (50, 100, 150, 1000)]
    assert rewards(answers) == [1.0, 1.0, 1.0 - LENGTH_CAP * (150 / 125 - 1), 1.0 - LENGTH_CAP]


def test_answers_outside_the_format_get_nothing_and_do_not_move_the_median() -> None:
    answers = [("42", 1, "stop"), ("Answer: 42", 1, "length"), ("Answer: 42", 100, "stop")]
    assert rewards(answers) == [0.0, 0.0, 1.0]


def test_lengths_are_in_characters_unless_all_token_counts_are_known() -> None:
    long, short = "x " * 45 + "Answer: 42", "Answer: 42"
    assert rewards([(short, 5, "stop"), (long, None, "stop")])[1] == 1.0 - LENGTH_CAP * (
        100 / 55 - 1
    )


def test_a_group_without_passing_answers_gets_zeros() -> None:
    assert rewards([("no", 1, "stop"), ("", 0, "stop")]) == [0.0, 0.0]


ANSWER = st.tuples(
    st.sampled_from(["Answer: 1", "nothing"]),
    st.integers(0, 5000),
    st.sampled_from(["stop", "length"]),
)


@given(st.lists(ANSWER, min_size=1, max_size=8))
def test_any_answer_in_the_format_beats_any_outside_it(answers: list[tuple[str, int, str]]) -> None:
    for (text, _, finish), reward in zip(answers, rewards([*answers]), strict=True):
        assert reward is not None
        is_inside = text == "Answer: 1" and finish == "stop"
        assert 1 - LENGTH_CAP <= reward <= 1 if is_inside else reward == 0
