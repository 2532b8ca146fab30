"""Betting sequences hold at every look, and are narrow where observations vary little."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.statistics.betting_sequence import NUM_CELLS, BettingSequence, BettingTest
from fakevllm.statistics.confidence_sequence import (
    ALPHA,
    DifferenceSequence,
    Interval,
    RewardRange,
)

UNIT = RewardRange(0.0, 1.0)
DIFFERENCES = RewardRange(-1.0, 1.0)
NUM_RUNS = 2000
NUM_PAIRS = 150
NUM_SAMPLES = 4

values = st.lists(st.floats(0, 1), min_size=1, max_size=40)
inside = st.floats(0.01, 0.99)


def interval_of(observations: Sequence[float], values: RewardRange = UNIT) -> Interval:
    sequence = BettingSequence(values)
    for value in observations:
        sequence.add(value)
    interval = sequence.interval()
    assert interval is not None
    return interval


@given(values)
def test_the_mean_is_inside_the_interval_and_the_interval_inside_the_range(
    observations: list[float],
) -> None:
    interval = interval_of(observations)
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1
    assert interval.mean == pytest.approx(sum(observations) / len(observations))


@given(values)
def test_mirrored_observations_have_the_mirrored_interval(observations: list[float]) -> None:
    one = interval_of(observations)
    other = interval_of([1 - value for value in observations])
    expected = (1 - one.high, 1 - one.mean, 1 - one.low)
    assert (other.low, other.mean, other.high) == pytest.approx(expected, abs=1e-4)


@given(values, st.floats(-3, 3), st.floats(0.1, 4))
def test_an_interval_moves_and_stretches_with_the_range(
    observations: list[float], shift: float, width: float
) -> None:
    one = interval_of(observations)
    moved = RewardRange(shift, shift + width)
    other = interval_of(
        [min(moved.high, max(moved.low, shift + width * value)) for value in observations], moved
    )
    expected = (shift + width * one.low, shift + width * one.mean, shift + width * one.high)
    assert (other.low, other.mean, other.high) == pytest.approx(expected, abs=1e-3 * width)


@given(values)
def test_the_order_of_observations_does_not_matter(observations: list[float]) -> None:
    one, other = interval_of(observations), interval_of(observations[::-1])
    assert (one.low, one.mean, one.high) == pytest.approx((other.low, other.mean, other.high))


@given(values, inside)
def test_a_value_is_never_both_above_and_below_the_interval(
    observations: list[float], value: float
) -> None:
    sequence = BettingSequence(UNIT)
    for observation in observations * 10:
        sequence.add(observation)
    interval = sequence.interval()
    assert interval is not None
    assert not (sequence.is_above(value) and sequence.is_below(value))
    if sequence.is_above(value):
        assert interval.low >= value - 2e-5
    elif sequence.is_below(value):
        assert interval.high <= value + 2e-5
    else:
        assert interval.low <= value <= interval.high


def test_an_empty_sequence_has_no_interval_and_decides_nothing() -> None:
    sequence = BettingSequence(UNIT)
    assert sequence.interval() is None
    assert not sequence.is_above(0.01)
    assert not sequence.is_below(0.99)


@given(values, inside)
def test_a_test_of_one_value_says_what_the_interval_says(
    observations: list[float], value: float
) -> None:
    sequence, test = BettingSequence(UNIT), BettingTest(UNIT, value)
    for observation in observations * 10:
        sequence.add(observation)
        test.add(observation)
        assert test.is_above or not sequence.is_above(value)
        assert test.is_below or not sequence.is_below(value)
    interval = sequence.interval()
    assert interval is not None
    if test.is_above:
        assert interval.low > value - 1e-3
    if test.is_below:
        assert interval.high < value + 1e-3


def test_observations_on_the_grid_lose_nothing_by_it() -> None:
    sequence, test = BettingSequence(DIFFERENCES), BettingTest(DIFFERENCES, -0.05)
    random_ = random.Random(3)
    for _ in range(300):
        difference = random_.randrange(-4, 5) / 4
        sequence.add(difference)
        test.add(difference)
        assert sequence.is_above(-0.05) == test.is_above
        assert sequence.is_below(-0.05) == test.is_below


def test_what_is_kept_does_not_grow_with_the_number_of_observations() -> None:
    sequence, test = BettingSequence(UNIT), BettingTest(UNIT, 0.5)
    random_ = random.Random(4)
    sizes: set[int] = set()
    for _ in range(5):
        for _ in range(2000):
            value = random_.random()
            sequence.add(value)
            test.add(value)
        sizes.add(len(pickle.dumps((sequence, test))))
    assert max(sizes) - min(sizes) < 100 < 10 * NUM_CELLS


def pair_difference(random_: random.Random, first: float, second: float) -> float:
    """Return the difference between the means of two parts of Bernoulli rewards."""
    one, other = (
        sum(random_.random() < mean for _ in range(NUM_SAMPLES)) for mean in (first, second)
    )
    return (other - one) / NUM_SAMPLES


def test_of_equal_versions_at_most_one_in_twenty_seems_different_at_any_look() -> None:
    """The differences are on the grid, so an interval says the same as this test of one value."""
    random_ = random.Random(20)
    num_missed = 0
    for _ in range(NUM_RUNS):
        test = BettingTest(DIFFERENCES, 0.0)
        solvable = random_.choice((0.5, 1.0, 4.0))
        for _ in range(NUM_PAIRS):
            mean = random_.betavariate(solvable, solvable)
            test.add(pair_difference(random_, mean, mean))
            if test.is_above or test.is_below:
                num_missed += 1
                break
    assert num_missed / NUM_RUNS <= ALPHA


def test_the_interval_contains_a_true_difference_at_every_look_in_95_of_100_runs() -> None:
    random_ = random.Random(21)
    num_missed = 0
    for _ in range(NUM_RUNS // 4):
        test = BettingTest(DIFFERENCES, -0.15)
        for _ in range(NUM_PAIRS):
            test.add(pair_difference(random_, 0.9, 0.75))
            if test.is_above or test.is_below:
                num_missed += 1
                break
    assert num_missed / (NUM_RUNS // 4) <= ALPHA


@pytest.mark.parametrize(
    ("solvable", "unsolvable", "most"),
    [(1e6, 1e6, 1.06), (2.0, 2.0, 0.97), (0.5, 0.5, 0.78), (1.8, 0.2, 0.58)],
    ids=["every row is solved half of the time", "most rows vary", "few rows vary", "easy rows"],
)
def test_the_interval_is_narrower_than_hoeffdings_where_rows_vary_little(
    solvable: float, unsolvable: float, most: float
) -> None:
    """The numbers are those of docs/releases.md."""
    random_ = random.Random(22)
    ratios: list[float] = []
    for _ in range(20):
        betting = BettingSequence(DIFFERENCES)
        hoeffding = DifferenceSequence(UNIT, tuned_for=500, num_per_part=NUM_SAMPLES)
        for _ in range(500):
            mean = random_.betavariate(solvable, unsolvable)
            parts = [[float(random_.random() < mean) for _ in range(NUM_SAMPLES)] for _ in range(2)]
            betting.add(sum(parts[1]) / NUM_SAMPLES - sum(parts[0]) / NUM_SAMPLES)
            hoeffding.add(*parts)
        one, other = betting.interval(), hoeffding.interval()
        assert one is not None and other is not None
        ratios.append((one.high - one.low) / (other.high - other.low))
    assert sum(ratios) / len(ratios) <= most
