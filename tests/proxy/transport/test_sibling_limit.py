from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.transport.sibling_limit import Grant, SiblingLimit


def test_where_every_app_waits_for_its_siblings_all_fit() -> None:
    sibling_limit = SiblingLimit()
    for num_groups in range(1, 100):
        assert sibling_limit.acquire(7, num_awaited=7 * num_groups, num_waiting=10_000) == Grant(7)


def test_apps_that_ask_for_few_leave_the_others_theirs() -> None:
    sibling_limit = SiblingLimit()
    assert sibling_limit.acquire(7, num_awaited=7, num_waiting=50) == Grant(7)
    assert sibling_limit.acquire(1, num_awaited=8, num_waiting=50) == Grant(1)
    assert sibling_limit.acquire(7, num_awaited=15, num_waiting=50) == Grant(7)


@pytest.mark.parametrize("num_waiting", [1000, None])
def test_a_group_that_asked_for_many_leaves_no_bound_wider(num_waiting: int | None) -> None:
    sibling_limit = SiblingLimit()
    assert sibling_limit.acquire(200, num_awaited=200, num_waiting=num_waiting) == Grant(200)
    sibling_limit.release(200)
    granted = [
        sibling_limit.acquire(3, num_awaited=3, num_waiting=num_waiting).num for _ in range(60)
    ]
    assert granted == [3] + [0] * 59


@pytest.mark.parametrize(
    ("num_waiting", "granted"),
    [
        (0, Grant(3)),
        (1, Grant(2, "engine_busy: 2 of 3 fit")),
        (50, Grant(0, "engine_busy: 0 of 3 fit")),
        (None, Grant(0, "engine_busy: 0 of 3 fit")),
    ],
)
def test_siblings_that_nobody_waits_for_shrink_groups_by_what_the_engine_cannot_keep_up_with(
    num_waiting: int | None, granted: Grant
) -> None:
    sibling_limit = SiblingLimit()
    for _ in range(2):
        assert sibling_limit.acquire(3, num_awaited=3, num_waiting=0) == Grant(3)
    assert sibling_limit.acquire(3, num_awaited=3, num_waiting=num_waiting) == granted


def test_siblings_that_nobody_waits_for_are_not_put_behind_leads_that_wait() -> None:
    assert SiblingLimit().acquire(7, num_awaited=0, num_waiting=50).num == 0
    assert SiblingLimit().acquire(7, num_awaited=0, num_waiting=None).num == 7


def test_no_group_shrinks_by_more_than_the_siblings_that_nobody_waits_for() -> None:
    sibling_limit = SiblingLimit()
    sibling_limit.acquire(3, num_awaited=3)
    sibling_limit.release(1)
    assert sibling_limit.acquire(3, num_awaited=3, num_waiting=50) == Grant(
        1, "engine_busy: 1 of 3 fit"
    )


@pytest.mark.parametrize("heard_every", [1, 5])
@pytest.mark.parametrize("num_done", [1, 2, 4, 7])
def test_under_steady_load_siblings_get_what_the_leads_leave_and_no_queue_grows(
    num_done: int, heard_every: int
) -> None:
    """A request a tick, whatever became of the others, and an engine that does `num_done` calls a
    tick, the oldest first: seven siblings each would be too many for it."""
    sibling_limit, queue = SiblingLimit(), deque[str]()
    num_granted = longest = heard = 0
    for tick in range(1000):
        if tick % heard_every == 0:
            heard = len(queue)
        granted = sibling_limit.acquire(7, num_awaited=0, num_waiting=heard).num
        queue.extend(["lead"] + ["sibling"] * granted)
        for _ in range(min(num_done, len(queue))):
            sibling_limit.release(queue.popleft() == "sibling")
        num_granted += granted
        longest = max(longest, len(queue))
    assert longest <= 8 * (1 + heard_every)
    assert num_granted >= 0.7 * 1000 * (num_done - 1)


def test_what_is_left_fits_again_and_what_does_not_fit_is_told() -> None:
    sibling_limit = SiblingLimit(fixed_limit=3)
    assert sibling_limit.acquire(2) == Grant(2)
    assert sibling_limit.acquire(2, num_awaited=4) == Grant(1, "siblings_in_flight: 1 of 2 fit")
    assert sibling_limit.acquire(1, num_awaited=5) == Grant(0, "siblings_in_flight: 0 of 1 fit")
    sibling_limit.release(2)
    assert sibling_limit.acquire(2, num_awaited=3) == Grant(2)


def test_what_the_engine_refuses_is_the_bound_and_each_group_that_goes_well_raises_it() -> None:
    sibling_limit = SiblingLimit()
    sibling_limit.acquire(5)
    running = [sibling_limit.sampling() for _ in range(5)]
    for one in running:
        one.__enter__()
    for one in running[:3]:
        sibling_limit.engine_refused()
        one.__exit__(None, None, None)
    sibling_limit.release(5)
    assert sibling_limit.acquire(5) == Grant(2, "engine_busy: 2 of 5 fit")
    sibling_limit.release(2)
    sibling_limit.request_succeeded()
    assert sibling_limit.acquire(5).num == 3


def test_an_engine_without_any_room_is_tried_again_once_a_lead_was_answered() -> None:
    sibling_limit = SiblingLimit()
    with sibling_limit.sampling():
        sibling_limit.engine_refused()
    assert sibling_limit.acquire(3).num == 0
    sibling_limit.request_succeeded()
    assert sibling_limit.acquire(3).num == 1


def test_an_engine_that_refuses_when_no_sibling_is_there_says_nothing_of_siblings() -> None:
    sibling_limit = SiblingLimit()
    sibling_limit.engine_refused()
    assert sibling_limit.acquire(3).num == 3


def test_an_engine_that_goes_well_for_long_has_no_bound_any_more() -> None:
    sibling_limit = SiblingLimit()
    with sibling_limit.sampling():
        sibling_limit.engine_refused()
    for _ in range(1024):
        sibling_limit.request_succeeded()
    assert sibling_limit.acquire(5000).num == 5000


def test_whether_siblings_were_there_is_known_although_they_have_gone() -> None:
    sibling_limit = SiblingLimit()
    with sibling_limit.sampling():
        before = sibling_limit.watch_engine()
    assert before() and not sibling_limit.watch_engine()()
    between = sibling_limit.watch_engine()
    with sibling_limit.sampling():
        pass
    assert between()


def test_the_end_of_a_sibling_wakes_the_lead_that_waits_longest() -> None:
    sibling_limit, woken = SiblingLimit(), list[str]()
    with sibling_limit.sampling(), sibling_limit.lead_waiting(lambda: woken.append("given up")):
        pass
    woken.clear()
    with (
        sibling_limit.sampling(),
        sibling_limit.lead_waiting(lambda: woken.append("first")),
        sibling_limit.lead_waiting(lambda: woken.append("second")),
    ):
        with sibling_limit.sampling():
            pass
        assert woken == ["first"]
        with sibling_limit.sampling():
            pass
    assert woken == ["first", "second"]


def test_who_would_wait_for_the_last_sibling_that_has_just_gone_does_not_wait() -> None:
    sibling_limit, woken = SiblingLimit(), list[str]()
    with sibling_limit.lead_waiting(lambda: woken.append("at once")):
        assert woken == ["at once"]


def test_while_a_lead_waits_no_group_gets_siblings() -> None:
    sibling_limit = SiblingLimit()
    with sibling_limit.sampling():
        with sibling_limit.lead_waiting(lambda: None):
            assert sibling_limit.acquire(3) == Grant(0, "engine_busy: 0 of 3 fit")
        assert sibling_limit.acquire(3) == Grant(3)


def test_what_was_not_taken_cannot_be_left() -> None:
    with pytest.raises(AssertionError):
        SiblingLimit().release()


@given(st.integers(1, 20), st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans())))
def test_never_more_than_the_bound_are_in_flight(
    bound: int, steps: list[tuple[int, bool, bool]]
) -> None:
    sibling_limit, taken = SiblingLimit(bound), list[int]()
    for asked, is_left, is_refused in steps:
        granted = sibling_limit.acquire(asked, num_awaited=sum(taken) + asked)
        assert 0 <= granted.num <= asked and (granted.cut_reason is None) == (granted.num == asked)
        taken.append(granted.num)
        assert sibling_limit.in_flight == sum(taken) <= bound
        if is_refused and granted.num:
            with sibling_limit.sampling():
                sibling_limit.engine_refused()
        else:
            sibling_limit.request_succeeded()
        if is_left:
            sibling_limit.release(taken.pop())
