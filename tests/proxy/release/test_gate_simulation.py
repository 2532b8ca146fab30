"""In simulated runs, the gate finds planted bad updates, and lets harmless ones pass."""

from __future__ import annotations

import random
import statistics

import pytest

from fakevllm_adapters.protocol.releases import Decision
from tests.proxy.release.simulated_run import CANARY_SHARE, RULES, SimulatedRun

pytestmark = pytest.mark.slow

NUM_RUNS = 200
MEAN = 0.6
NUM_BAD_STEPS = 10
NUM_SESSIONS = 4000


class PlantedFall:
    """Training that is harmless, except in ten steps of one run, in which the mean falls step by
    step, as it does if rewards have the wrong sign."""

    def __init__(self, fall: float, first_bad_step: int) -> None:
        self.fall = fall
        self._first = first_bad_step
        self._step = 0

    def next_mean(self, mean: float) -> float:
        self._step += 1
        is_bad = self._first <= self._step < self._first + NUM_BAD_STEPS
        return mean - self.fall / NUM_BAD_STEPS if is_bad else mean

    @property
    def has_fallen(self) -> bool:
        return self._step >= self._first + NUM_BAD_STEPS - 1

    @property
    def has_begun(self) -> bool:
        return self._step >= self._first


def test_planted_bad_updates_stay_in_the_canary_share_and_are_rolled_back() -> None:
    random_ = random.Random(7)
    num_bad = num_sessions = 0
    waits: list[int] = []
    num_missed = num_small_left = num_small = 0
    for seed in range(NUM_RUNS):
        planted = PlantedFall(random_.uniform(0.02, 0.35), random_.randrange(1, 40))
        run = SimulatedRun(seed, MEAN, planted.next_mean)
        began = ended = bad_before = 0
        while not ended and run.num_sessions < NUM_SESSIONS:
            run.session()
            if planted.has_begun and not began:
                began, bad_before = run.num_sessions, run.num_bad
            is_restored = run.server.means[-1] > MEAN - planted.fall + 1e-9
            if planted.has_fallen and is_restored:
                ended = run.num_sessions
        num_bad += run.num_bad - bad_before
        num_sessions += run.num_sessions - began
        if planted.fall > 2 * RULES.margin:
            num_missed += not ended or run.server.means[-1] < MEAN - 2 * RULES.margin
            waits.append(ended - began)
        else:
            num_small += 1
            num_small_left += not ended
    print(
        f"share of bad answers until rollback {num_bad / num_sessions:.4f}; falls of more than "
        f"twice the margin: {len(waits)}, not rolled back {num_missed}; sessions until rollback: "
        f"median {statistics.median(waits):.0f}, worst {max(waits)}; smaller falls that stayed: "
        f"{num_small_left} of {num_small}"
    )
    assert num_missed == 0
    assert num_bad / num_sessions <= CANARY_SHARE + 0.02


def test_at_most_one_in_twenty_harmless_updates_is_rejected() -> None:
    verdicts: list[Decision] = []
    for seed in range(NUM_RUNS):
        run = SimulatedRun(1000 + seed, MEAN)
        while not set(run.decisions) & {Decision.RELEASED, Decision.REJECTED, Decision.UNDECIDED}:
            run.session()
        verdicts.append(run.decisions[-1])
    counts = {decision.value: verdicts.count(decision) for decision in set(verdicts)}
    print(f"verdicts on harmless updates: {counts}")
    assert verdicts.count(Decision.REJECTED) <= NUM_RUNS / 20
    assert verdicts.count(Decision.RELEASED) > NUM_RUNS / 2
