"""diversity: quality first, then being different; copies share."""

from __future__ import annotations

from typing import Any

import pytest

from reward_hooks import diversity

LONG = "one two three four five six seven eight nine ten eleven twelve"


def rewards(*contents: str | None, finish: str = "stop") -> list[float | None]:
    answers: list[dict[str, Any]] = [
        {"content": content, "finish_reason": finish} for content in contents
    ]
    return diversity.on_compute_relative_reward([], answers, "q")


def test_an_answer_unlike_the_others_gets_more_than_copies_do() -> None:
    assert rewards("It is 7.", "it is 7", "Seven, of course.") == [1.25, 1.25, 1.5]


def test_the_bonus_of_a_cluster_does_not_depend_on_its_size() -> None:
    for size in range(1, 6):
        scores = rewards(*["the same"] * size)
        assert sum((score or 0) - diversity.QUALITY for score in scores) == pytest.approx(
            diversity.BONUS
        )


def test_a_copy_with_a_character_changed_is_one_where_no_spaces_are_written() -> None:
    text = "".join(chr(0x4E00 + at) for at in range(120))
    changed = text[:60] + "\u9f9f" + text[61:]
    other = "".join(chr(0x5E00 + at) for at in range(120))
    assert diversity.clusters_of([text, changed, other]) == [[0, 1], [2]]
    assert diversity.word_runs("naïve Ö 7") == {("naïve", "ö", "7")}


def test_being_odd_does_not_make_up_for_being_bad() -> None:
    assert rewards("fine", "fine", None, "  ") == [1.25, 1.25, 0.0, 0.0]
    assert rewards("cut off", finish="length") == [0.0]


def test_a_word_changed_in_a_long_text_is_another_text_and_one_added_to_a_very_long_is_not() -> (
    None
):
    assert diversity.clusters_of([LONG, LONG.replace("six", "6")]) == [[0], [1]]
    assert diversity.clusters_of([LONG * 9, LONG * 9 + " end"]) == [[0, 1]]


def test_empty_texts_are_copies_of_each_other() -> None:
    assert diversity.clusters_of(["", "?!", "word"]) == [[0, 1], [2]]
