"""The words that are marked in answers, and the time that this takes."""

from __future__ import annotations

import random
import time

import pytest

from fakevllm.console import text_differences
from fakevllm.console.text_differences import TextPart, mark_differences

NUM_WORDS = 2000
MAX_SECONDS = 2.0
"""A comparison takes a few milliseconds, but the machine may be busy."""


def marked(text: str, reference: str) -> list[str]:
    (parts,) = mark_differences([text], reference)
    assert "".join(part.text for part in parts) == text
    return [part.text for part in parts if part.is_different]


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("The sum is 41, of course.", "The sum is 42, of course.", ["41"]),
        ("one new  word, and the rest", "one and the rest", ["new  word,"]),
        ("one  two\n", " one two", []),
        (" all new ", "other", ["all new"]),
        ("new one", "one", ["new"]),
        ("added", "", ["added"]),
        ("", "all", []),
        ("a b a b c", "a b c", ["a b"]),
    ],
)
def test_words_that_the_reference_does_not_have_are_marked(
    text: str, reference: str, expected: list[str]
) -> None:
    assert marked(text, reference) == expected


def test_the_words_without_a_mark_are_a_longest_common_subsequence() -> None:
    chance = random.Random(1)
    for _ in range(300):
        text, reference = (
            [chance.choice("abcd") for _ in range(chance.randrange(10))] for _ in range(2)
        )
        num_marked = sum(len(part.split()) for part in marked(" ".join(text), " ".join(reference)))
        assert len(text) - num_marked == length_in_common(text, reference)


def length_in_common(one: list[str], other: list[str]) -> int:
    lengths = [0] * (len(other) + 1)
    for word in one:
        above = lengths.copy()
        for index, other_word in enumerate(other):
            is_equal = word == other_word
            lengths[index + 1] = (
                above[index] + 1 if is_equal else max(above[index + 1], lengths[index])
            )
    return lengths[-1]


@pytest.mark.parametrize("shared", ["", "the "])
def test_texts_that_share_almost_nothing_are_compared_quickly(shared: str) -> None:
    text, reference = (
        " ".join(f"{shared}{name}{number}" for number in range(NUM_WORDS)) for name in "ab"
    )
    start = time.monotonic()
    assert marked(text, reference)
    assert time.monotonic() - start < MAX_SECONDS


def test_texts_that_are_too_long_together_have_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_differences, "MAX_COMPARISONS", 5)
    first, second, third = mark_differences(["a c", "a d", "a b"], "a b")
    assert first == [TextPart("a "), TextPart("c", is_different=True)]
    assert second == [TextPart("a d")] and third == [TextPart("a b")]
