"""Lines about what happens again and again."""

from __future__ import annotations

from fakevllm.seldom import MAX_KINDS, Seldom


def test_of_more_kinds_than_are_remembered_the_one_told_longest_ago_is_new_again() -> None:
    seldom = Seldom(every_s=1.0)
    for kind in range(MAX_KINDS):
        seldom.due(kind, 0.0)
    assert seldom.due(0, 0.5) is None
    seldom.due(0, 2.0)  # told again, so it is not the oldest
    seldom.due("one more", 2.0)
    assert seldom.due(0, 2.5) is None
    due = seldom.due(1, 2.5)
    assert due is not None and due.is_first
