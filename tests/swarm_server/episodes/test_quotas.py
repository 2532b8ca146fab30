"""Mixes of tasks get their shares of the training steps, however fast their clients are."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakevllm_server.episodes.quotas import (
    MIN_UNPRODUCTIVE_TASKS,
    REQUESTING_S,
    UNDER_WAY_S,
    UNPRODUCTIVE_BATCHES,
    MixQuotas,
)

LEAD = 1.5
RETRY_S = 2.0
STALENESS = 4
FOR_EVER_S = 20_000.0
"""Maximum simulated time in seconds. Every simulation needs far less."""


@dataclass(frozen=True)
class MixClients:
    """Clients of one mix: how many episodes they run at once, and how long one takes."""

    name: str
    share: float
    num_workers: int
    seconds: float
    pooled_share: float = 1.0
    """Share of the tasks that are pooled."""


class Steps:
    """Training steps, each of which takes the newest waiting tasks.

    A step takes `seconds`. No client may claim meanwhile, so that the clock of the mixes does not
    advance. The other tasks keep waiting, and may become stale.
    """

    def __init__(self, mixes: MixQuotas, batch_size: int, seconds: float) -> None:
        self._mixes, self._batch_size, self._seconds = mixes, batch_size, seconds
        self._stood_s = 0.0
        self._waiting: dict[str, str] = {}
        self._due_since: float | None = None
        self.begun: dict[str, int] = {}
        self.num_made = 0
        self.trained: Counter[str] = Counter()

    @property
    def is_due(self) -> bool:
        return self._due_since is not None

    def clock(self, now: float) -> float:
        return (now if self._due_since is None else self._due_since) - self._stood_s

    def completed(self, name: str, task: str, now: float, *, is_pooled: bool) -> None:
        self._mixes.completed(task, task, is_pooled=is_pooled)
        if is_pooled:
            self._waiting[task] = name
        if self._due_since is None and len(self._waiting) >= self._batch_size:
            self._due_since = now

    def advance(self, now: float) -> None:
        if self._due_since is None or now < self._due_since + self._seconds:
            return
        self._stood_s += now - self._due_since
        self._due_since = None
        for task in list(self._waiting):
            if self.num_made - self.begun[task] > STALENESS:
                del self._waiting[task]
                self._mixes.dropped(task)
        if len(self._waiting) < self._batch_size:
            return
        for task in list(self._waiting)[-self._batch_size :]:
            self.trained[self._waiting.pop(task)] += 1
            self._mixes.taken(task)
        self.num_made += 1


def simulated_shares(
    mix_clients: list[MixClients],
    batch_size: int,
    num_steps: int,
    num_repeat: int,
    seed: int,
    step_s: float = 2.0,
) -> dict[str, float]:
    """Simulate clients, and return the share of each mix in the trained tasks.

    A worker that may not begin its next episode tries again after RETRY_S. The episodes of one step
    can run at the same time.
    """
    rng, mixes = random.Random(seed), MixQuotas(batch_size)
    steps = Steps(mixes, batch_size, step_s)
    repeats: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    num_running = 0
    events = [
        (rng.random(), number, mix.name, "")
        for mix in mix_clients
        for number in range(mix.num_workers)
    ]
    by_name = {mix.name: mix for mix in mix_clients}
    heapq.heapify(events)
    while steps.num_made < num_steps:
        now, worker, name, task = heapq.heappop(events)
        assert now < FOR_EVER_S, f"{steps.num_made} steps, and then none"
        mix = by_name[name]
        steps.advance(now)
        if task:
            num_running -= 1
            mixes.ended(task, task, steps.clock(now))
            repeats[task] += 1
            if repeats[task] == num_repeat:
                steps.completed(name, task, now, is_pooled=rng.random() < mix.pooled_share)
        number = numbers[name]
        task = f"{name}-{number // num_repeat}"
        clock = steps.clock(now)
        may_begin = not steps.is_due and mixes.may_begin(name, mix.share, LEAD, task, clock)
        if may_begin and num_running < batch_size * num_repeat:
            num_running += 1
            numbers[name] += 1
            steps.begun.setdefault(task, steps.num_made)
            mixes.claimed(name, task, clock)
            heapq.heappush(events, (now + rng.expovariate(1 / mix.seconds), worker, name, task))
        else:
            heapq.heappush(events, (now + RETRY_S, worker, name, ""))
    return {mix.name: steps.trained[mix.name] / (batch_size * num_steps) for mix in mix_clients}


FAST_AND_SLOW = [
    MixClients("math", 0.4, 64, 1.0),
    MixClients("code", 0.3, 16, 20.0),
    MixClients("chat", 0.3, 4, 2.0, pooled_share=0.6),
]


@pytest.mark.parametrize("step_s", [2.0, 2 * REQUESTING_S])
@pytest.mark.parametrize("seed", range(5))
def test_the_tasks_of_twenty_steps_match_the_requested_shares(seed: int, step_s: float) -> None:
    shares = simulated_shares(
        FAST_AND_SLOW, 8, num_steps=20, num_repeat=4, seed=seed, step_s=step_s
    )
    for mix in FAST_AND_SLOW:
        assert shares[mix.name] == pytest.approx(mix.share, abs=0.03)


SHORT_AND_LONG = [
    MixClients("math", 0.4, 16, 0.05),
    MixClients("words", 0.3, 16, 0.2),
    MixClients("format", 0.3, 16, 0.8),
]
"""Mixes with so many workers that some tasks become stale while they wait."""


@pytest.mark.parametrize("seed", range(5))
def test_stale_groups_do_not_change_the_shares(seed: int) -> None:
    shares = simulated_shares(SHORT_AND_LONG, batch_size=10, num_steps=20, num_repeat=2, seed=seed)
    for mix in SHORT_AND_LONG:
        assert shares[mix.name] == pytest.approx(mix.share, abs=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_a_mix_with_one_pooled_task_in_five_gets_its_share(seed: int) -> None:
    mix_clients = [
        MixClients("easy", 0.5, 16, 1.0),
        MixClients("hard", 0.5, 16, 5.0, pooled_share=0.2),
    ]
    shares = simulated_shares(mix_clients, batch_size=8, num_steps=20, num_repeat=2, seed=seed)
    assert shares["hard"] == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("num_workers", [1, 16, 64])
def test_a_mix_without_pooled_tasks_does_not_block_the_others(num_workers: int) -> None:
    mix_clients = [
        MixClients("easy", 0.4, 16, 1.0),
        MixClients("other", 0.2, 16, 1.0),
        MixClients("hard", 0.4, num_workers, 5.0, pooled_share=0.0),
    ]
    shares = simulated_shares(mix_clients, batch_size=8, num_steps=60, num_repeat=2, seed=0)
    assert shares["easy"] == pytest.approx(2 / 3, abs=0.05), (
        "the share without the unproductive mix"
    )
    assert shares["other"] == pytest.approx(1 / 3, abs=0.05)


@settings(max_examples=40)
@given(
    shares=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    seconds=st.lists(st.floats(0.5, 30), min_size=4, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_shares_are_within_three_points_at_any_speed(
    shares: list[int], seconds: list[float], seed: int
) -> None:
    mix_clients = [
        MixClients(str(i), share / sum(shares), 16, seconds[i]) for i, share in enumerate(shares)
    ]
    found = simulated_shares(mix_clients, batch_size=16, num_steps=20, num_repeat=2, seed=seed)
    for mix in mix_clients:
        assert found[mix.name] == pytest.approx(mix.share, abs=0.03)


def test_a_single_mix_is_never_held_back() -> None:
    mixes = MixQuotas(4)
    for number in range(100):
        assert mixes.may_begin("math", 0.1, LEAD, f"t{number}", 0.0)
        mixes.claimed("math", f"t{number}", 0.0)


def complete_tasks(mixes: MixQuotas, name: str, share: float, now: float) -> int:
    """Complete tasks while the mix may begin another one; return their number."""
    for number in range(1000):
        task = f"{name}-{now}-{number}"
        if not mixes.may_begin(name, share, LEAD, task, now):
            return number
        mixes.claimed(name, task, now)
        mixes.ended(task, task, now)
        mixes.completed(task, task, is_pooled=True)
    return 1000


def test_a_mix_without_requests_holds_no_other_back_and_does_not_catch_up() -> None:
    mixes = MixQuotas(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    assert complete_tasks(mixes, "code", 0.5, 0.0) == 6
    later = REQUESTING_S + 1
    assert complete_tasks(mixes, "code", 0.5, later) == 1000
    assert mixes.may_begin("math", 0.5, LEAD, "m", later)
    assert complete_tasks(mixes, "code", 0.5, later) == 6
    assert complete_tasks(mixes, "math", 0.5, later) == 12


def test_a_new_mix_starts_at_the_level_of_the_others() -> None:
    mixes = MixQuotas(8)
    assert complete_tasks(mixes, "code", 0.5, 0.0) == 1000
    assert mixes.may_begin("math", 0.5, LEAD, "m", 1.0)
    assert complete_tasks(mixes, "code", 0.5, 1.0) == 6


def test_a_mix_with_running_episodes_is_waited_for_without_a_time_limit() -> None:
    mixes = MixQuotas(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    mixes.claimed("math", "m", 0.0)
    assert complete_tasks(mixes, "code", 0.5, 10 * REQUESTING_S) < 20
    mixes.abandoned("m", 10 * REQUESTING_S)
    assert complete_tasks(mixes, "code", 0.5, 20 * REQUESTING_S) == 1000


def test_repeats_of_a_task_that_has_begun_are_never_delayed() -> None:
    mixes = MixQuotas(2)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    mixes.claimed("math", "m", 0.0)
    assert mixes.may_begin("code", 0.5, LEAD, "first", 0.0)
    mixes.claimed("code", "first", 0.0)
    assert complete_tasks(mixes, "code", 0.5, 0.0) < 1000
    assert mixes.may_begin("code", 0.5, LEAD, "first", 0.0)


def abandon_num_tasks(mixes: MixQuotas, name: str, num: int, now: float) -> None:
    for number in range(num):
        task = f"{name}-{now}-failed-{number}"
        assert mixes.may_begin(name, 0.5, LEAD, task, now)
        mixes.claimed(name, task, now)
        mixes.abandoned(task, now)


def drop_num_tasks(mixes: MixQuotas, name: str, num: int, now: float) -> None:
    for number in range(num):
        task = f"{name}-{now}-failed-{number}"
        assert mixes.may_begin(name, 0.5, LEAD, task, now)
        mixes.claimed(name, task, now)
        mixes.ended(task, task, now)
        mixes.completed(task, task, is_pooled=False)


@pytest.mark.parametrize("fail_tasks", [drop_num_tasks, abandon_num_tasks])
def test_a_mix_with_only_unproductive_tasks_is_not_waited_for(
    fail_tasks: Callable[[MixQuotas, str, int, float], None],
) -> None:
    mixes = MixQuotas(8)
    fail_tasks(mixes, "hard", MIN_UNPRODUCTIVE_TASKS - 1, 0.0)
    assert complete_tasks(mixes, "easy", 0.5, 0.0) == 6, "few failures are tolerated"
    fail_tasks(mixes, "hard", 1, 1.0)
    assert complete_tasks(mixes, "easy", 0.5, 1.0) == 1000
    assert leave_tasks_incomplete(mixes, "hard", 1.0) == 6, "it may still try"


def test_a_large_batch_tolerates_more_unproductive_tasks() -> None:
    mixes = MixQuotas(100)
    assert mixes.may_begin("easy", 0.5, LEAD, "e", 0.0)
    drop_num_tasks(mixes, "hard", UNPRODUCTIVE_BATCHES * 50 - 1, 0.0)
    assert complete_tasks(mixes, "easy", 0.5, 0.0) == 75
    drop_num_tasks(mixes, "hard", 1, 1.0)
    assert complete_tasks(mixes, "easy", 0.5, 1.0) == 1000


def test_a_mix_that_is_productive_again_is_waited_for_and_does_not_catch_up() -> None:
    mixes = MixQuotas(8)
    drop_num_tasks(mixes, "hard", MIN_UNPRODUCTIVE_TASKS, 0.0)
    assert complete_tasks(mixes, "easy", 0.5, 0.0) == 1000
    assert complete_tasks(mixes, "hard", 0.5, 0.0) == 6
    assert complete_tasks(mixes, "easy", 0.5, 1.0) == 12


def test_unproductive_mixes_do_not_wait_for_each_other() -> None:
    mixes = MixQuotas(8)
    assert mixes.may_begin("harder", 0.5, LEAD, "h", 0.0)
    assert complete_tasks(mixes, "hard", 0.5, 0.0) == 6
    assert complete_tasks(mixes, "harder", 0.5, 0.0) == 12
    for name in ("hard", "harder"):
        drop_num_tasks(mixes, name, MIN_UNPRODUCTIVE_TASKS, 1.0)
    for number in range(12):
        mixes.dropped(f"harder-0.0-{number}")
    assert mixes.may_begin("hard", 0.5, LEAD, "h", 2.0)
    assert mixes.may_begin("harder", 0.5, LEAD, "i", 2.0)


def leave_tasks_incomplete(mixes: MixQuotas, name: str, now: float) -> int:
    """Begin tasks and leave them incomplete while the mix may begin another one; return their
    number."""
    for number in range(1000):
        task = f"{name}-{now}-{number}"
        if not mixes.may_begin(name, 0.5, LEAD, task, now):
            return number
        mixes.claimed(name, task, now)
        mixes.ended(task, task, now)
    return 1000


def test_an_incomplete_task_without_running_episodes_counts_for_a_limited_time() -> None:
    mixes = MixQuotas(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    assert leave_tasks_incomplete(mixes, "code", 0.0) == 6
    later = UNDER_WAY_S + 1
    assert mixes.may_begin("math", 0.5, LEAD, "m", UNDER_WAY_S)
    assert leave_tasks_incomplete(mixes, "code", UNDER_WAY_S) == 0
    assert mixes.may_begin("math", 0.5, LEAD, "m", later)
    assert leave_tasks_incomplete(mixes, "code", later) == 6


def test_tasks_of_abandoned_episodes_do_not_count() -> None:
    mixes = MixQuotas(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    for number in range(100):
        assert mixes.may_begin("code", 0.5, LEAD, f"c{number}", 0.0)
        mixes.claimed("code", f"c{number}", 0.0)
        mixes.abandoned(f"c{number}", 0.0)


def test_a_changed_share_applies_only_to_later_tasks() -> None:
    mixes = MixQuotas(8)
    begun: Counter[str] = Counter()
    for rounds, shares in ((range(100), (0.6, 0.4)), (range(100, 200), (0.2, 0.4))):
        begun.clear()
        for now in rounds:
            for name, share in zip(("math", "code"), shares, strict=True):
                begun[name] += complete_tasks(mixes, name, share, float(now) / 10)
    assert begun["math"] / begun.total() == pytest.approx(1 / 3, abs=0.02)


def test_an_episode_counts_for_the_task_that_it_was_ended_with() -> None:
    mixes = MixQuotas(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    num_begun = 0
    while num_begun < 100 and mixes.may_begin("code", 0.5, LEAD, f"c{num_begun}", 0.0):
        mixes.claimed("code", f"c{num_begun}", 0.0)
        mixes.ended(f"c{num_begun}", f"other {num_begun}", 0.0)
        mixes.completed(f"other {num_begun}", f"g{num_begun}", is_pooled=True)
        num_begun += 1
    assert num_begun == 6


def test_a_task_that_is_completed_repeatedly_counts_each_time() -> None:
    mixes = MixQuotas(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    assert mixes.may_begin("code", 0.5, LEAD, "c", 0.0)
    mixes.claimed("code", "c", 0.0)
    mixes.claimed("code", "c", 0.0)
    for group in ("first", "second"):
        mixes.ended("c", "c", 0.0)
        mixes.completed("c", group, is_pooled=True)
    assert complete_tasks(mixes, "code", 0.5, 0.0) == 4


def test_mixes_that_return_after_a_pause_can_both_begin() -> None:
    """One mix was removed, and the other has an incomplete task."""
    mixes = MixQuotas(8)
    for now in range(20):
        for name in ("math", "code"):
            complete_tasks(mixes, name, 0.5, float(now) / 10)
    complete_tasks(mixes, "math", 0.5, 2.0)
    assert mixes.may_begin("code", 0.5, LEAD, "half", 2.0)
    mixes.claimed("code", "half", 2.0)
    mixes.ended("half", "half", 2.0)
    later = 2.0 + REQUESTING_S + UNDER_WAY_S + 1
    mixes.sweep(later)
    assert len(mixes) == 1
    assert mixes.may_begin("math", 0.5, LEAD, "m", later)
    assert mixes.may_begin("code", 0.5, LEAD, "c", later)


def test_a_mix_without_requests_or_tasks_is_removed() -> None:
    mixes = MixQuotas(8)
    for number in range(10):
        assert mixes.may_begin(f"client {number}", 0.5, LEAD, "t", 0.0)
    mixes.claimed("client 3", "t", 0.0)
    mixes.sweep(REQUESTING_S)
    assert len(mixes) == 10
    mixes.sweep(REQUESTING_S + 1)
    assert len(mixes) == 1
    mixes.ended("t", "t", REQUESTING_S + 1)
    mixes.completed("t", "t", is_pooled=True)
    mixes.sweep(REQUESTING_S + 1)
    assert len(mixes) == 0


def test_a_task_that_is_dropped_while_it_waits_no_longer_counts() -> None:
    mixes = MixQuotas(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    assert complete_tasks(mixes, "code", 0.5, 0.0) == 6
    mixes.taken("code-0.0-0")
    mixes.dropped("code-0.0-0")
    assert complete_tasks(mixes, "code", 0.5, 1.0) == 0
    mixes.dropped("code-0.0-1")
    assert complete_tasks(mixes, "code", 0.5, 2.0) == 1
