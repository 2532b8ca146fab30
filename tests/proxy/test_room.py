import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.room import Grant, Room


def test_without_a_bound_all_fit() -> None:
    room = Room()
    assert (room.take(255), room.take(255)) == (Grant(255), Grant(255))


def test_what_is_left_fits_again_and_what_does_not_fit_is_told() -> None:
    room = Room(bound=3)
    assert room.take(2) == Grant(2)
    assert room.take(2) == Grant(1, "siblings_in_flight: 1 of 2 fit")
    assert room.take(1) == Grant(0, "siblings_in_flight: 0 of 1 fit")
    room.leave(2)
    assert room.take(2) == Grant(2)


def test_what_the_engine_refuses_is_the_bound_and_each_group_that_goes_well_raises_it() -> None:
    room = Room()
    room.take(5)
    room.heard(5, num_refused=3)
    room.leave(5)
    assert room.take(5) == Grant(2, "engine_busy: 2 of 5 fit")
    room.leave(2)
    room.heard(2, num_refused=0)
    assert room.take(5).num == 3


def test_an_engine_without_any_room_is_tried_again_once_a_lead_was_answered() -> None:
    room = Room()
    room.heard(1, num_refused=1)
    assert room.take(3).num == 0
    room.heard(0, num_refused=0)
    assert room.take(3).num == 1


def test_an_engine_that_goes_well_for_long_has_no_bound_any_more() -> None:
    room = Room()
    room.heard(1, num_refused=1)
    for _ in range(1024):
        room.heard(0, num_refused=0)
    assert room.take(5000).num == 5000


def test_what_was_not_taken_cannot_be_left() -> None:
    with pytest.raises(AssertionError):
        Room().leave()


@given(st.integers(1, 20), st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 9))))
def test_never_more_than_the_bound_are_in_flight(
    bound: int, steps: list[tuple[int, bool, int]]
) -> None:
    room, taken = Room(bound), list[int]()
    for asked, is_left, refused in steps:
        granted = room.take(asked)
        assert 0 <= granted.num <= asked and (granted.cut is None) == (granted.num == asked)
        taken.append(granted.num)
        assert room.in_flight == sum(taken) <= bound
        room.heard(room.in_flight, min(refused, granted.num))
        if is_left:
            room.leave(taken.pop())
