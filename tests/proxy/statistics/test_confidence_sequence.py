"""Confidence sequences hold at every look, and are as narrow as their formula says."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.statistics.confidence_sequence import (
    ALPHA,
    ConfidenceSequence,
    DifferenceSequence,
    Interval,
    RewardRange,
    best_rho,
    normal_mixture,
)
from fakevllm.statistics.session_means import session_means

UNIT = RewardRange(0.0, 1.0)
NUM_SESSIONS = 200

variances = st.floats(0.01, 1e6)
alphas = st.floats(0.001, 0.2)
rewards = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@given(variances, alphas, st.floats(0.05, 20))
def test_no_rho_makes_a_narrower_interval_at_the_chosen_variance_than_the_best_one(
    variance: float, alpha: float, factor: float
) -> None:
    rho = best_rho(variance, alpha)
    best = normal_mixture(variance, rho, alpha)
    assert best <= normal_mixture(variance, rho * factor, alpha) * (1 + 1e-12)


@given(variances, variances, alphas)
def test_the_boundary_of_a_sum_grows_with_its_variance_and_slower_than_it(
    first: float, second: float, alpha: float
) -> None:
    small, large = sorted((first, second))
    rho = best_rho(1.0, alpha)
    low, high = (normal_mixture(value, rho, alpha) for value in (small, large))
    assert low <= high
    assert high / large <= low / small * (1 + 1e-12)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=50), st.floats(-3, 3), st.floats(0.1, 4))
def test_an_interval_moves_and_stretches_with_the_rewards(
    values: list[float], shift: float, factor: float
) -> None:
    plain, changed = ConfidenceSequence(1.0), ConfidenceSequence(factor)
    for value in values:
        plain.add(value)
        changed.add(value * factor + shift)
    one, other = plain.interval(), changed.interval()
    assert one is not None and other is not None
    for a, b in ((one.low, other.low), (one.mean, other.mean), (one.high, other.high)):
        assert b == pytest.approx(a * factor + shift, abs=1e-9)


@given(st.lists(st.tuples(rewards, rewards), min_size=1, max_size=30))
def test_the_difference_of_swapped_pairs_is_the_negative_one(
    pairs: list[tuple[list[float], list[float]]],
) -> None:
    forward, backward = DifferenceSequence(UNIT), DifferenceSequence(UNIT)
    for first, second in pairs:
        forward.add(first, second)
        backward.add(second, first)
    one, other = forward.interval(), backward.interval()
    assert one is not None and other is not None
    assert (one.low, one.mean, one.high) == pytest.approx((-other.high, -other.mean, -other.low))


@given(rewards, st.integers(2, 6))
def test_more_samples_for_a_row_narrow_the_interval_of_the_difference(
    values: list[float], times: int
) -> None:
    few, many = DifferenceSequence(UNIT), DifferenceSequence(UNIT)
    few.add(values, values)
    many.add(values * times, values * times)
    one, other = few.interval(), many.interval()
    assert one is not None and other is not None
    assert other.high - other.low < one.high - one.low


def test_a_sequence_without_observations_has_no_interval() -> None:
    assert ConfidenceSequence(0.5).interval() is None
    assert DifferenceSequence(UNIT).interval() is None


def test_260_pairs_of_rewards_with_a_scale_of_0_45_give_an_interval_of_0_085() -> None:
    sequence = ConfidenceSequence(0.45, tuned_for=260)
    for _ in range(260):
        sequence.add(0.0)
    interval = sequence.interval()
    assert interval is not None
    assert interval.high == pytest.approx(0.085, abs=0.0005)


@pytest.mark.parametrize("factor", [0.25, 0.5, 2, 5])
def test_an_interval_tuned_for_another_number_is_at_most_a_fifth_wider(factor: float) -> None:
    tuned, other = best_rho(factor, ALPHA), best_rho(1.0, ALPHA)
    ratio = normal_mixture(factor, other, ALPHA) / normal_mixture(factor, tuned, ALPHA)
    assert 1 <= ratio <= 1.2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1)), max_size=30))
def test_each_session_is_one_observation_within_the_range_of_its_turns(
    turns: list[tuple[str, float]],
) -> None:
    means = session_means(turns)
    assert list(means) == list(dict.fromkeys(session for session, _ in turns))
    for session, mean in means.items():
        values = [value for name, value in turns if name == session]
        assert min(values) - 1e-12 <= mean <= max(values) + 1e-12


def _session(rng: random.Random) -> float:
    """Return the mean reward of a session of one to eight turns. The turns of one session are alike
    because they share the session's difficulty."""
    solves = rng.betavariate(0.5, 0.5)
    turns = [("s", float(rng.random() < solves)) for _ in range(rng.randint(1, 8))]
    return session_means(turns)["s"]


def _always_covers(rng: random.Random) -> bool:
    """Run an A/A test with a look after each pair of sessions. Return True if the interval
    contained zero, the true difference, at every look."""
    gain = DifferenceSequence(UNIT, tuned_for=NUM_SESSIONS)
    for _ in range(NUM_SESSIONS):
        gain.add([_session(rng)], [_session(rng)])
        interval = gain.interval()
        assert interval is not None
        if not interval.contains(0.0):
            return False
    return True


def _gaussian_mean_always_covers(rng: random.Random) -> bool:
    """Return True if the interval for the mean of Gaussian rewards, for which the bound is nearly
    exact, contained their true mean at every look."""
    sequence = ConfidenceSequence(2.0, tuned_for=NUM_SESSIONS)
    for _ in range(NUM_SESSIONS):
        sequence.add(rng.gauss(3.0, 2.0))
        interval = sequence.interval()
        assert interval is not None
        if not interval.contains(3.0):
            return False
    return True


def _ordinary_interval_always_covers(rng: random.Random) -> bool:
    """Run the same A/A test with an ordinary 95 % interval, which is valid for only one look."""
    total = squares = 0.0
    for num in range(1, NUM_SESSIONS + 1):
        value = _session(rng) - _session(rng)
        total, squares = total + value, squares + value**2
        mean = total / num
        radius = 1.96 * math.sqrt(max(0.0, squares / num - mean**2) / num)
        if num >= 10 and not Interval(mean - radius, mean, mean + radius).contains(0.0):
            return False
    return True


def _coverage(run: Callable[[random.Random], bool], num_runs: int) -> float:
    return sum(run(random.Random(seed)) for seed in range(num_runs)) / num_runs


@pytest.mark.parametrize("run", [_always_covers, _gaussian_mean_always_covers])
def test_a_look_after_each_session_misses_the_truth_in_at_most_one_run_of_twenty(
    run: Callable[[random.Random], bool],
) -> None:
    assert _coverage(run, 300) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("run", [_always_covers, _gaussian_mean_always_covers])
def test_2000_runs_with_a_look_after_each_session_have_a_coverage_of_at_least_95_percent(
    run: Callable[[random.Random], bool],
) -> None:
    assert _coverage(run, 2000) >= 0.95


def test_an_ordinary_interval_with_a_look_after_each_session_misses_the_truth_often() -> None:
    assert _coverage(_ordinary_interval_always_covers, 100) < 0.85
