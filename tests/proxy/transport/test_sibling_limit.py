"""Number of siblings that each group may start."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.transport.sibling_limit import Grant, SiblingLimit


def test_all_siblings_fit_if_every_app_waits_for_its_siblings() -> None:
    sibling_limit = SiblingLimit()
    for num_groups in range(1, 100):
        assert sibling_limit.acquire(7, num_awaited=7 * num_groups, num_waiting=10_000) == Grant(7)


def test_a_group_with_few_siblings_does_not_shrink_the_groups_of_other_apps() -> None:
    sibling_limit = SiblingLimit()
    assert sibling_limit.acquire(7, num_awaited=7, num_waiting=50) == Grant(7)
    assert sibling_limit.acquire(1, num_awaited=8, num_waiting=50) == Grant(1)
    assert sibling_limit.acquire(7, num_awaited=15, num_waiting=50) == Grant(7)


@pytest.mark.parametrize("num_waiting", [1000, None])
def test_a_large_group_raises_no_limit_for_later_groups(num_waiting: int | None) -> None:
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
def test_unawaited_siblings_shrink_groups_by_the_length_of_the_engines_queue(
    num_waiting: int | None, granted: Grant
) -> None:
    sibling_limit = SiblingLimit()
    for _ in range(2):
        assert sibling_limit.acquire(3, num_awaited=3, num_waiting=0) == Grant(3)
    assert sibling_limit.acquire(3, num_awaited=3, num_waiting=num_waiting) == granted


def test_unawaited_siblings_are_not_queued_behind_waiting_leads() -> None:
    assert SiblingLimit().acquire(7, num_awaited=0, num_waiting=50).num == 0
    assert SiblingLimit().acquire(7, num_awaited=0, num_waiting=None).num == 7


def test_no_group_shrinks_by_more_than_the_number_of_unawaited_siblings() -> None:
    sibling_limit = SiblingLimit()
    sibling_limit.acquire(3, num_awaited=3)
    sibling_limit.release(1)
    assert sibling_limit.acquire(3, num_awaited=3, num_waiting=50) == Grant(
        1, "engine_busy: 1 of 3 fit"
    )


@pytest.mark.parametrize("probe_every", [1, 5])
@pytest.mark.parametrize("num_done", [1, 2, 4, 7])
def test_under_steady_load_siblings_use_the_remaining_capacity_and_no_queue_grows(
    num_done: int, probe_every: int
) -> None:
    """One request arrives per tick, and the engine completes `num_done` calls per tick, oldest
    first. It could not complete seven siblings of each request."""
    sibling_limit, queue = SiblingLimit(), deque[str]()
    num_granted = longest = queue_length = 0
    for tick in range(1000):
        if tick % probe_every == 0:
            queue_length = len(queue)
        granted = sibling_limit.acquire(7, num_awaited=0, num_waiting=queue_length).num
        queue.extend(["lead"] + ["sibling"] * granted)
        for _ in range(min(num_done, len(queue))):
            sibling_limit.release(queue.popleft() == "sibling")
        num_granted += granted
        longest = max(longest, len(queue))
    assert longest <= 8 * (1 + probe_every)
    assert num_granted >= 0.7 * 1000 * (num_done - 1)


def test_released_capacity_can_be_acquired_again_and_a_cut_has_a_reason() -> None:
    sibling_limit = SiblingLimit(fixed_limit=3)
    assert sibling_limit.acquire(2) == Grant(2)
    assert sibling_limit.acquire(2, num_awaited=4) == Grant(1, "siblings_in_flight: 1 of 2 fit")
    assert sibling_limit.acquire(1, num_awaited=5) == Grant(0, "siblings_in_flight: 0 of 1 fit")
    sibling_limit.release(2)
    assert sibling_limit.acquire(2, num_awaited=3) == Grant(2)


def test_a_refusal_of_the_engine_sets_the_limit_and_each_success_raises_it() -> None:
    sibling_limit = SiblingLimit()
    sibling_limit.acquire(5)
    running = [sibling_limit.sampling() for _ in range(5)]
    for sibling in running:
        sibling.__enter__()
    for sibling in running[:3]:
        sibling_limit.engine_refused()
        sibling.__exit__(None, None, None)
    sibling_limit.release(5)
    assert sibling_limit.acquire(5) == Grant(2, "engine_busy: 2 of 5 fit")
    sibling_limit.release(2)
    sibling_limit.request_succeeded()
    assert sibling_limit.acquire(5).num == 3


def test_an_engine_without_free_capacity_is_tried_again_once_a_lead_was_answered() -> None:
    sibling_limit = SiblingLimit()
    with sibling_limit.sampling():
        sibling_limit.engine_refused()
    assert sibling_limit.acquire(3).num == 0
    sibling_limit.request_succeeded()
    assert sibling_limit.acquire(3).num == 1


def test_a_refusal_without_siblings_at_the_engine_sets_no_limit() -> None:
    sibling_limit = SiblingLimit()
    sibling_limit.engine_refused()
    assert sibling_limit.acquire(3).num == 3


def test_after_many_successes_the_limit_is_dropped() -> None:
    sibling_limit = SiblingLimit()
    with sibling_limit.sampling():
        sibling_limit.engine_refused()
    for _ in range(1024):
        sibling_limit.request_succeeded()
    assert sibling_limit.acquire(5000).num == 5000


def test_siblings_that_have_ended_since_the_watch_began_are_reported() -> None:
    sibling_limit = SiblingLimit()
    with sibling_limit.sampling():
        before = sibling_limit.watch_engine()
    assert before() and not sibling_limit.watch_engine()()
    between = sibling_limit.watch_engine()
    with sibling_limit.sampling():
        pass
    assert between()


def test_the_end_of_a_sibling_wakes_the_lead_that_has_waited_longest() -> None:
    sibling_limit, woken = SiblingLimit(), list[str]()
    with sibling_limit.sampling(), sibling_limit.lead_waiting(lambda: woken.append("left early")):
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


def test_a_lead_does_not_wait_if_the_last_sibling_has_just_ended() -> None:
    sibling_limit, woken = SiblingLimit(), list[str]()
    with sibling_limit.lead_waiting(lambda: woken.append("at once")):
        assert woken == ["at once"]


def test_while_a_lead_waits_no_group_gets_siblings() -> None:
    sibling_limit = SiblingLimit()
    with sibling_limit.sampling():
        with sibling_limit.lead_waiting(lambda: None):
            assert sibling_limit.acquire(3) == Grant(0, "engine_busy: 0 of 3 fit")
        assert sibling_limit.acquire(3) == Grant(3)


def test_capacity_that_was_not_acquired_cannot_be_released() -> None:
    with pytest.raises(AssertionError):
        SiblingLimit().release()


@given(st.integers(1, 20), st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans())))
def test_siblings_in_flight_never_exceed_the_fixed_limit(
    bound: int, steps: list[tuple[int, bool, bool]]
) -> None:
    sibling_limit, acquired = SiblingLimit(bound), list[int]()
    for num_requested, is_released, is_refused in steps:
        granted = sibling_limit.acquire(num_requested, num_awaited=sum(acquired) + num_requested)
        assert 0 <= granted.num <= num_requested and (granted.cut_reason is None) == (
            granted.num == num_requested
        )
        acquired.append(granted.num)
        assert sibling_limit.in_flight == sum(acquired) <= bound
        if is_refused and granted.num:
            with sibling_limit.sampling():
                sibling_limit.engine_refused()
        else:
            sibling_limit.request_succeeded()
        if is_released:
            sibling_limit.release(acquired.pop())
