"""Held-out rows are recognised by their text, and never trained."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.admission.held_out import HeldOutRows
from fakevllm_adapters.protocol.swarm import Task


def rows(*texts: str) -> HeldOutRows:
    return HeldOutRows(Task(task_id=text, main_query=text) for text in texts)


@given(st.text(), st.text(), st.text(min_size=1).filter(str.strip))
def test_a_text_with_a_held_out_row_in_it_quotes_it(before: str, after: str, row: str) -> None:
    assert rows("another row", row).are_quoted("no row", f"{before} {row.strip()} {after}")


def test_case_and_white_space_do_not_hide_a_row() -> None:
    assert rows("What is 1 plus 2?").are_quoted("WHAT  is\n1 plus 2? Answer with a number.")


def test_a_part_of_a_row_is_not_a_quotation() -> None:
    assert not rows("What is 1 plus 2?").are_quoted("What is 1", "plus 2?")


@pytest.mark.parametrize(
    ("row", "text", "is_quoted"),
    [
        ("What is 2 plus 3", "What is 2 plus 37", False),
        ("What is 2 plus 3", "What is 2 plus 3!", True),
        ("What is 2 plus 3", "What is 2 plus 37, and what is 2 plus 3", True),
        ("hi", "this is nothing", False),
        ("hi", "Say _hi_.", True),
        ("is it?", "is it?yes", True),
        ("2加3是多少", "请回答2加3是多少谢谢", True),
        ("2加3", "2加37", False),
    ],
)
def test_a_row_within_a_longer_word_or_number_is_not_quoted(
    row: str, text: str, is_quoted: bool
) -> None:
    assert rows(row).are_quoted(text) == is_quoted


class CountedText(str):
    """A text that counts how often it is read."""

    num_reads = 0

    def split(self, *arguments: Any, **named: Any) -> list[str]:
        CountedText.num_reads += 1
        return super().split(*arguments, **named)


def test_each_distinct_text_is_read_once_and_none_without_held_out_rows() -> None:
    CountedText.num_reads = 0
    texts = [CountedText("What is 2 plus 3?") for _ in range(3)]
    assert not rows().are_quoted(*texts)
    assert CountedText.num_reads == 0
    assert not rows("What is 2 plus 5?").are_quoted(*texts)
    assert CountedText.num_reads == 1


def test_rows_that_may_stand_in_unrelated_texts_are_known() -> None:
    assert rows("hi", "What is 2 plus 5?").short == ["hi"]


def test_without_rows_and_with_blank_rows_nothing_is_quoted() -> None:
    assert not rows().are_quoted("anything")
    assert not rows("", "  ").are_quoted("anything", "")


def test_tasks_that_contain_a_held_out_row_overlap_with_it() -> None:
    tasks = [Task(task_id=text, main_query=text) for text in ("a b c", "b", "c d")]
    assert [task.task_id for task in rows("B").overlapping(tasks)] == ["a b c", "b"]
