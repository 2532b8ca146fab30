"""The hook diversity: quality is a gate, different answers get a bonus, and copies share it."""

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


def test_an_answer_unlike_the_others_gets_more_than_copies() -> None:
    assert rewards("It is 7.", "it is 7", "Seven, of course.") == [1.25, 1.25, 1.5]


def test_the_bonus_of_a_cluster_does_not_depend_on_its_size() -> None:
    for size in range(1, 6):
        scores = rewards(*["the same"] * size)
        assert sum((score or 0) - diversity.QUALITY for score in scores) == pytest.approx(
            diversity.BONUS
        )


def test_in_a_script_without_spaces_one_changed_character_still_makes_a_copy() -> None:
    text = "".join(chr(0x4E00 + offset) for offset in range(120))
    changed = text[:60] + "\u9f9f" + text[61:]
    other = "".join(chr(0x5E00 + offset) for offset in range(120))
    assert diversity.clusters_of([text, changed, other]) == [[0, 1], [2]]
    assert diversity.word_ngrams("naïve Ö 7") == {("naïve", "ö", "7")}


def test_a_different_answer_that_does_not_pass_gets_nothing() -> None:
    assert rewards("fine", "fine", None, "  ") == [1.25, 1.25, 0.0, 0.0]
    assert rewards("cut off", finish="length") == [0.0]


def test_one_changed_word_matters_in_a_long_text_and_not_in_a_very_long_one() -> None:
    assert diversity.clusters_of([LONG, LONG.replace("six", "6")]) == [[0], [1]]
    assert diversity.clusters_of([LONG * 9, LONG * 9 + " end"]) == [[0, 1]]


def test_empty_texts_are_copies_of_each_other() -> None:
    assert diversity.clusters_of(["", "?!", "word"]) == [[0, 1], [2]]
