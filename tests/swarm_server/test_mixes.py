"""Shares of tasks, whoever is fast and whoever is slow."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_server.mixes import ASKING_S, FORGOTTEN_S, Mixes

LEAD = 1.5
RETRY_S = 2.0


@dataclass(frozen=True)
class Kind:
    """Clients of one mix: how many episodes they run at once, and how long one takes."""

    name: str
    share: float
    num_workers: int
    seconds: float
    yield_: float = 1.0
    """Of its tasks, how many are pooled."""


def realised(
    kinds: list[Kind], batch_size: int, num_steps: int, num_repeat: int, seed: int
) -> dict[str, float]:
    """Shares of what the first steps were made of. Each worker asks for its next episode, again
    after two seconds where it may not begin."""
    drawn, mixes = random.Random(seed), Mixes(batch_size)
    repeats: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    trained: list[str] = []
    events = [
        (drawn.random(), one, kind.name, "") for kind in kinds for one in range(kind.num_workers)
    ]
    of = {kind.name: kind for kind in kinds}
    heapq.heapify(events)
    while len(trained) < batch_size * num_steps:
        now, worker, name, task = heapq.heappop(events)
        kind = of[name]
        if task:
            mixes.released(name, task, now)
            repeats[task] += 1
            if repeats[task] == num_repeat:
                is_pooled = drawn.random() < kind.yield_
                mixes.completed(name, task, is_pooled=is_pooled)
                trained += [name] * is_pooled
        number = numbers[name]
        task = f"{name}-{number // num_repeat}"
        if mixes.may_begin(name, kind.share, LEAD, task, now):
            numbers[name] += 1
            mixes.claimed(name, task, now)
            heapq.heappush(events, (now + drawn.expovariate(1 / kind.seconds), worker, name, task))
        else:
            heapq.heappush(events, (now + RETRY_S, worker, name, ""))
    counts = Counter(trained[: batch_size * num_steps])
    return {kind.name: counts[kind.name] / (batch_size * num_steps) for kind in kinds}


FAST_AND_SLOW = [
    Kind("math", 0.4, 64, 1.0),
    Kind("code", 0.3, 16, 20.0),
    Kind("chat", 0.3, 4, 2.0, yield_=0.6),
]


@pytest.mark.parametrize("seed", range(5))
def test_twenty_steps_have_the_mix_that_was_asked_for(seed: int) -> None:
    shares = realised(FAST_AND_SLOW, batch_size=8, num_steps=20, num_repeat=4, seed=seed)
    for kind in FAST_AND_SLOW:
        assert shares[kind.name] == pytest.approx(kind.share, abs=0.03)


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
    mixes = Mixes(4)
    for number in range(100):
        assert mixes.may_begin("math", 0.1, LEAD, f"t{number}", 0.0)
        mixes.claimed("math", f"t{number}", 0.0)


def filled(mixes: Mixes, name: str, share: float, now: float) -> int:
    """How many tasks it may begin at once."""
    for number in range(1000):
        task = f"{name}-{now}-{number}"
        if not mixes.may_begin(name, share, LEAD, task, now):
            return number
        mixes.claimed(name, task, now)
        mixes.released(name, task, now)
        mixes.completed(name, task, is_pooled=True)
    return 1000


def test_a_mix_that_has_gone_holds_nobody_back_and_has_nothing_to_make_up_for() -> None:
    mixes = Mixes(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    assert filled(mixes, "code", 0.5, 0.0) == 6
    later = ASKING_S + 1
    assert filled(mixes, "code", 0.5, later) == 1000
    assert mixes.may_begin("math", 0.5, LEAD, "m", later)
    assert filled(mixes, "code", 0.5, later) == 6
    assert filled(mixes, "math", 0.5, later) == 12


def test_a_mix_whose_episodes_run_is_waited_for_however_long_they_take() -> None:
    mixes = Mixes(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    mixes.claimed("math", "m", 0.0)
    assert filled(mixes, "code", 0.5, 10 * ASKING_S) < 20
    mixes.released("math", "m", 10 * ASKING_S)
    assert filled(mixes, "code", 0.5, 20 * ASKING_S) == 1000


def test_repeats_of_a_task_that_has_begun_are_never_held_back() -> None:
    mixes = Mixes(2)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    mixes.claimed("math", "m", 0.0)
    assert mixes.may_begin("code", 0.5, LEAD, "first", 0.0)
    mixes.claimed("code", "first", 0.0)
    assert filled(mixes, "code", 0.5, 0.0) < 1000
    assert mixes.may_begin("code", 0.5, LEAD, "first", 0.0)


def left_open(mixes: Mixes, name: str, now: float) -> int:
    """How many tasks it may begin and leave half done."""
    for number in range(1000):
        task = f"{name}-{now}-{number}"
        if not mixes.may_begin(name, 0.5, LEAD, task, now):
            return number
        mixes.claimed(name, task, now)
        mixes.released(name, task, now)
    return 1000


def test_a_task_that_nobody_goes_on_with_is_forgotten() -> None:
    mixes = Mixes(8)
    assert mixes.may_begin("math", 0.5, LEAD, "m", 0.0)
    assert left_open(mixes, "code", 0.0) == 6
    soon, later = FORGOTTEN_S - ASKING_S, FORGOTTEN_S + 1
    assert mixes.may_begin("math", 0.5, LEAD, "m", soon)
    assert left_open(mixes, "code", soon) == 0
    assert mixes.may_begin("math", 0.5, LEAD, "m", later)
    assert left_open(mixes, "code", later) == 6
