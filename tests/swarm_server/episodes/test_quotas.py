"""Shares of tasks, whoever is fast and whoever is slow."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
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
"""No simulation takes nearly so long."""


@dataclass(frozen=True)
class Kind:
    """Clients of one mix: how many episodes they run at once, and how long one takes."""

    name: str
    share: float
    num_workers: int
    seconds: float
    yield_: float = 1.0
    """Of its tasks, how many are pooled."""


class Steps:
    """The newest of what waits makes a step, `seconds` after it is there; nobody may claim
    meanwhile, so the mixes' clock stands. The rest waits on, and grows stale."""

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

    def look(self, now: float) -> None:
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


def realised(
    kinds: list[Kind],
    batch_size: int,
    num_steps: int,
    num_repeat: int,
    seed: int,
    step_s: float = 2.0,
) -> dict[str, float]:
    """Shares of what the first steps were made of. Each worker asks for its next episode, again
    after two seconds where it may not begin; as many are played at once as a step needs."""
    drawn, mixes = random.Random(seed), MixQuotas(batch_size)
    steps = Steps(mixes, batch_size, step_s)
    repeats: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    num_running = 0
    events = [
        (drawn.random(), one, kind.name, "") for kind in kinds for one in range(kind.num_workers)
    ]
    of = {kind.name: kind for kind in kinds}
    heapq.heapify(events)
    while steps.num_made < num_steps:
        now, worker, name, task = heapq.heappop(events)
        assert now < FOR_EVER_S, f"{steps.num_made} steps, and then none"
        kind = of[name]
        steps.look(now)
        if task:
            num_running -= 1
            mixes.ended(task, task, steps.clock(now))
            repeats[task] += 1
            if repeats[task] == num_repeat:
                steps.completed(name, task, now, is_pooled=drawn.random() < kind.yield_)
        number = numbers[name]
        task = f"{name}-{number // num_repeat}"
        clock = steps.clock(now)
        may_begin = not steps.is_due and mixes.may_begin(name, kind.share, LEAD, task, clock)
        if may_begin and num_running < batch_size * num_repeat:
            num_running += 1
            numbers[name] += 1
            steps.begun.setdefault(task, steps.num_made)
            mixes.claimed(name, task, clock)
            heapq.heappush(events, (now + drawn.expovariate(1 / kind.seconds), worker, name, task))
        else:
            heapq.heappush(events, (now + RETRY_S, worker, name, ""))
    return {kind.name: steps.trained[kind.name] / (batch_size * num_steps) for kind in kinds}


FAST_AND_SLOW = [
    Kind("math", 0.4, 64, 1.0),
    Kind("code", 0.3, 16, 20.0),
    Kind("chat", 0.3, 4, 2.0, yield_=0.6),
]


@pytest.mark.parametrize("step_s", [2.0, 2 * REQUESTING_S])
@pytest.mark.parametrize("seed", range(5))
def test_twenty_steps_have_the_mix_that_was_asked_for(seed: int, step_s: float) -> None:
    shares = realised(FAST_AND_SLOW, 8, num_steps=20, num_repeat=4, seed=seed, step_s=step_s)
    for kind in FAST_AND_SLOW:
        assert shares[kind.name] == pytest.approx(kind.share, abs=0.03)


SHORT_AND_LONG = [
    Kind("math", 0.4, 16, 0.05),
    Kind("words", 0.3, 16, 0.2),
    Kind("format", 0.3, 16, 0.8),
]
"""So many at once that some wait until they are stale."""


@pytest.mark.parametrize("seed", range(5))
def test_what_grows_stale_changes_no_mix(seed: int) -> None:
    shares = realised(SHORT_AND_LONG, batch_size=10, num_steps=20, num_repeat=2, seed=seed)
    for kind in SHORT_AND_LONG:
        assert shares[kind.name] == pytest.approx(kind.share, abs=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_a_mix_of_which_one_task_in_five_is_pooled_gets_its_share(seed: int) -> None:
    kinds = [Kind("easy", 0.5, 16, 1.0), Kind("hard", 0.5, 16, 5.0, yield_=0.2)]
    shares = realised(kinds, batch_size=8, num_steps=20, num_repeat=2, seed=seed)
    assert shares["hard"] == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("num_workers", [1, 16, 64])
def test_a_mix_that_gives_nothing_stops_nobodys_training(num_workers: int) -> None:
    kinds = [
        Kind("easy", 0.4, 16, 1.0),
        Kind("other", 0.2, 16, 1.0),
        Kind("hard", 0.4, num_workers, 5.0, yield_=0.0),
    ]
    shares = realised(kinds, batch_size=8, num_steps=60, num_repeat=2, seed=0)
    assert shares["easy"] == pytest.approx(2 / 3, abs=0.05), "of what there is"
    assert shares["other"] == pytest.approx(1 / 3, abs=0.05)


@given(
    shares=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    seconds=st.lists(st.floats(0.5, 30), min_size=4, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_any_mix_of_any_speeds_is_within_three_points(
    shares: list[int], seconds: list[float], seed: int
) -> None:
    kinds = [Kind(str(i), share / sum(shares), 16, seconds[i]) for i, share in enumerate(shares)]
    found = realised(kinds, batch_size=16, num_steps=20, num_repeat=2, seed=seed)
    for kind in kinds:
        assert found[kind.name] == pytest.approx(kind.share, abs=0.03)


def test_a_mix_that_is_alone_is_never_held_back() -> None:
    mixes = MixQuotas(4)
    for number in range(100):
        assert mixes.may_begin("math", 0.1, LEAD, f"t{number}", 0.0)
        mixes.claimed("math", f"t{number}", 0.0)


def filled(mixes: MixQuotas, name: str, share: float, now: float) -> int:
    """How many tasks it may begin at once."""
    for number in range(1000):
        task = f"{name}-{now}-{number}"
        if not mixes.may_begin(name, share, LEAD, task, now):
            return number
        mixes.claimed(name, task, now)
        mixes.ended(task, task, now)
        mixes.completed(task, task, is_pooled=True)
    return 1000


def test_a_mix_that_has_gone_holds_nobody_back_and_has_nothing_to_make_up_for() -> None:
    mixes = MixQuotas(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    assert filled(mixes, "code", 0.5, 0.0) == 6
    later = REQUESTING_S + 1
    assert filled(mixes, "code", 0.5, later) == 1000
    assert mixes.may_begin("math", 0.5, LEAD, "m", later)
    assert filled(mixes, "code", 0.5, later) == 6
    assert filled(mixes, "math", 0.5, later) == 12


def test_who_comes_later_begins_where_the_others_are() -> None:
    mixes = MixQuotas(8)
    assert filled(mixes, "code", 0.5, 0.0) == 1000
    assert mixes.may_begin("math", 0.5, LEAD, "m", 1.0)
    assert filled(mixes, "code", 0.5, 1.0) == 6


def test_a_mix_whose_episodes_run_is_waited_for_however_long_they_take() -> None:
    mixes = MixQuotas(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    mixes.claimed("math", "m", 0.0)
    assert filled(mixes, "code", 0.5, 10 * REQUESTING_S) < 20
    mixes.abandoned("m", 10 * REQUESTING_S)
    assert filled(mixes, "code", 0.5, 20 * REQUESTING_S) == 1000


def test_repeats_of_a_task_that_has_begun_are_never_held_back() -> None:
    mixes = MixQuotas(2)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    mixes.claimed("math", "m", 0.0)
    assert mixes.may_begin("code", 0.5, LEAD, "first", 0.0)
    mixes.claimed("code", "first", 0.0)
    assert filled(mixes, "code", 0.5, 0.0) < 1000
    assert mixes.may_begin("code", 0.5, LEAD, "first", 0.0)


def gives_up(mixes: MixQuotas, name: str, num: int, now: float) -> None:
    for number in range(num):
        task = f"{name}-{now}-vain-{number}"
        assert mixes.may_begin(name, 0.5, LEAD, task, now)
        mixes.claimed(name, task, now)
        mixes.abandoned(task, now)


def drops(mixes: MixQuotas, name: str, num: int, now: float) -> None:
    for number in range(num):
        task = f"{name}-{now}-vain-{number}"
        assert mixes.may_begin(name, 0.5, LEAD, task, now)
        mixes.claimed(name, task, now)
        mixes.ended(task, task, now)
        mixes.completed(task, task, is_pooled=False)


@pytest.mark.parametrize("abandon_tasks", [drops, gives_up])
def test_a_mix_whose_tasks_come_to_nothing_is_not_waited_for(
    abandon_tasks: Callable[[MixQuotas, str, int, float], None],
) -> None:
    mixes = MixQuotas(8)
    abandon_tasks(mixes, "hard", MIN_UNPRODUCTIVE_TASKS - 1, 0.0)
    assert filled(mixes, "easy", 0.5, 0.0) == 6, "that may be bad luck"
    abandon_tasks(mixes, "hard", 1, 1.0)
    assert filled(mixes, "easy", 0.5, 1.0) == 1000
    assert left_open(mixes, "hard", 1.0) == 6, "it tries on, and takes no place of the others"


def test_several_parts_of_a_large_batch_have_to_come_to_nothing() -> None:
    mixes = MixQuotas(100)
    assert mixes.may_begin("easy", 0.5, LEAD, "e", 0.0)
    drops(mixes, "hard", UNPRODUCTIVE_BATCHES * 50 - 1, 0.0)
    assert filled(mixes, "easy", 0.5, 0.0) == 75
    drops(mixes, "hard", 1, 1.0)
    assert filled(mixes, "easy", 0.5, 1.0) == 1000


def test_a_mix_that_gives_something_again_is_waited_for_with_nothing_to_make_up_for() -> None:
    mixes = MixQuotas(8)
    drops(mixes, "hard", MIN_UNPRODUCTIVE_TASKS, 0.0)
    assert filled(mixes, "easy", 0.5, 0.0) == 1000
    assert filled(mixes, "hard", 0.5, 0.0) == 6
    assert filled(mixes, "easy", 0.5, 1.0) == 12


def test_where_all_mixes_give_nothing_none_waits_for_another() -> None:
    mixes = MixQuotas(8)
    assert mixes.may_begin("harder", 0.5, LEAD, "h", 0.0)
    assert filled(mixes, "hard", 0.5, 0.0) == 6
    assert filled(mixes, "harder", 0.5, 0.0) == 12
    for name in ("hard", "harder"):
        drops(mixes, name, MIN_UNPRODUCTIVE_TASKS, 1.0)
    for number in range(12):
        mixes.dropped(f"harder-0.0-{number}")
    assert mixes.may_begin("hard", 0.5, LEAD, "h", 2.0)
    assert mixes.may_begin("harder", 0.5, LEAD, "i", 2.0)


def left_open(mixes: MixQuotas, name: str, now: float) -> int:
    """How many tasks it may begin and leave half done."""
    for number in range(1000):
        task = f"{name}-{now}-{number}"
        if not mixes.may_begin(name, 0.5, LEAD, task, now):
            return number
        mixes.claimed(name, task, now)
        mixes.ended(task, task, now)
    return 1000


def test_a_task_that_lacks_episodes_nobody_plays_is_not_under_way_for_long() -> None:
    mixes = MixQuotas(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    assert left_open(mixes, "code", 0.0) == 6
    later = UNDER_WAY_S + 1
    assert mixes.may_begin("math", 0.5, LEAD, "m", UNDER_WAY_S)
    assert left_open(mixes, "code", UNDER_WAY_S) == 0
    assert mixes.may_begin("math", 0.5, LEAD, "m", later)
    assert left_open(mixes, "code", later) == 6


def test_episodes_that_are_given_up_leave_nothing_under_way() -> None:
    mixes = MixQuotas(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    for number in range(100):
        assert mixes.may_begin("code", 0.5, LEAD, f"c{number}", 0.0)
        mixes.claimed("code", f"c{number}", 0.0)
        mixes.abandoned(f"c{number}", 0.0)


def test_another_share_holds_from_then_on_and_not_for_what_is_past() -> None:
    mixes = MixQuotas(8)
    begun: Counter[str] = Counter()
    for rounds, shares in ((range(100), (0.6, 0.4)), (range(100, 200), (0.2, 0.4))):
        begun.clear()
        for now in rounds:
            for name, share in zip(("math", "code"), shares, strict=True):
                begun[name] += filled(mixes, name, share, float(now) / 10)
    assert begun["math"] / begun.total() == pytest.approx(1 / 3, abs=0.02)


def test_an_episode_handed_in_for_another_task_than_it_was_claimed_for_counts_there() -> None:
    mixes = MixQuotas(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    num_begun = 0
    while num_begun < 100 and mixes.may_begin("code", 0.5, LEAD, f"c{num_begun}", 0.0):
        mixes.claimed("code", f"c{num_begun}", 0.0)
        mixes.ended(f"c{num_begun}", f"other {num_begun}", 0.0)
        mixes.completed(f"other {num_begun}", f"g{num_begun}", is_pooled=True)
        num_begun += 1
    assert num_begun == 6


def test_a_task_that_is_played_on_after_it_is_complete_counts_each_time() -> None:
    mixes = MixQuotas(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    assert mixes.may_begin("code", 0.5, LEAD, "c", 0.0)
    mixes.claimed("code", "c", 0.0)
    mixes.claimed("code", "c", 0.0)
    for group in ("first", "second"):
        mixes.ended("c", "c", 0.0)
        mixes.completed("c", group, is_pooled=True)
    assert filled(mixes, "code", 0.5, 0.0) == 4


def test_who_comes_back_before_others_leaves_them_no_way_to_make_up() -> None:
    """One is forgotten, the other has a task that lacks an episode."""
    mixes = MixQuotas(8)
    for now in range(20):
        for name in ("math", "code"):
            filled(mixes, name, 0.5, float(now) / 10)
    filled(mixes, "math", 0.5, 2.0)
    assert mixes.may_begin("code", 0.5, LEAD, "half", 2.0)
    mixes.claimed("code", "half", 2.0)
    mixes.ended("half", "half", 2.0)
    later = 2.0 + REQUESTING_S + UNDER_WAY_S + 1
    mixes.sweep(later)
    assert len(mixes) == 1
    assert mixes.may_begin("math", 0.5, LEAD, "m", later)
    assert mixes.may_begin("code", 0.5, LEAD, "c", later)


def test_who_has_gone_is_forgotten() -> None:
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


def test_a_task_that_was_dropped_while_it_waited_leaves_its_place_to_another() -> None:
    mixes = MixQuotas(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    assert filled(mixes, "code", 0.5, 0.0) == 6
    mixes.taken("code-0.0-0")
    mixes.dropped("code-0.0-0")
    assert filled(mixes, "code", 0.5, 1.0) == 0
    mixes.dropped("code-0.0-1")
    assert filled(mixes, "code", 0.5, 2.0) == 1
