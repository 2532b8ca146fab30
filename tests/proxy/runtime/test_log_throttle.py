"""What is told of now and then."""

from __future__ import annotations

from fakevllm.runtime.log_throttle import MAX_KINDS, Due, Seldom

FIRST = Due(is_first=True, num_untold=0)


def test_each_kind_is_told_at_once_and_then_with_the_number_of_the_others() -> None:
    seldom = Seldom(5.0)
    told = [seldom.due("a", now) for now in (0.0, 1.0, 2.0, 5.0, 6.0, 10.0, 20.0)]
    again = [Due(is_first=False, num_untold=number) for number in (2, 1, 0)]
    assert told == [FIRST, None, None, again[0], None, again[1], again[2]]
    assert seldom.due("b", 20.0) == FIRST


def test_of_too_many_kinds_the_one_told_longest_ago_is_forgotten() -> None:
    seldom = Seldom(5.0)
    for kind in range(MAX_KINDS):
        assert seldom.due(kind, 0.0) == FIRST
    assert seldom.due(0, 6.0) == Due(is_first=False, num_untold=0)
    assert seldom.due("one more", 6.0) == FIRST
    assert seldom.due(0, 7.0) is None, "it was told since"
    assert seldom.due(2, 7.0) == Due(is_first=False, num_untold=0)
    assert seldom.due(1, 7.0) == FIRST
