"""Means, intervals and comparisons of evaluated rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.evaluation.results import (
    UNIT_RANGE,
    RowScores,
    compare,
    covering_range,
    summarize,
    unsolved_rows,
)
from fakevllm.statistics.confidence_sequence import RewardRange

scores = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(
        RowScores,
        st.lists(st.floats(0, 1), min_size=1, max_size=4),
        st.one_of(st.none(), st.floats(0, 1)),
    ),
)


def test_each_row_counts_once_however_many_samples_have_a_reward() -> None:
    summary = summarize(
        {"a": RowScores([1.0, 1.0, 1.0, 1.0], 1.0), "b": RowScores([0.0], None)}, UNIT_RANGE
    )
    assert summary.num_rows == 2
    assert summary.mean is not None and summary.mean.mean == 0.5
    assert summary.greedy == 1.0


@given(scores)
def test_the_interval_contains_the_mean_and_is_absent_without_rows(
    version: dict[str, RowScores],
) -> None:
    summary = summarize(version, UNIT_RANGE)
    if not version:
        assert summary.mean is None and summary.greedy is None
        return
    assert summary.mean is not None
    assert 0 <= summary.mean.low <= summary.mean.mean <= summary.mean.high <= 1


@given(scores, scores)
def test_wins_and_losses_swap_with_the_versions(
    first: dict[str, RowScores], second: dict[str, RowScores]
) -> None:
    forward, backward = compare(first, second, UNIT_RANGE), compare(second, first, UNIT_RANGE)
    assert (forward.wins, forward.losses) == (backward.losses, backward.wins)
    assert forward.ties == backward.ties
    assert forward.wins + forward.losses + forward.ties == len(first.keys() & second.keys())


def test_only_rows_of_both_versions_are_compared() -> None:
    first = {"a": RowScores([0.0], None), "b": RowScores([1.0], None), "c": RowScores([1.0], None)}
    second = {"a": RowScores([1.0], None), "b": RowScores([1.0], None)}
    comparison = compare(first, second, UNIT_RANGE)
    assert (comparison.wins, comparison.losses, comparison.ties) == (1, 0, 1)
    assert comparison.difference is not None and comparison.difference.mean == 0.5


def test_a_row_is_solved_if_any_sample_of_any_version_solves_it() -> None:
    first = {"a": RowScores([0.0, 0.2], 1.0), "b": RowScores([0.9], None)}
    second = {"b": RowScores([0.0], 0.0), "c": RowScores([0.5, 1.0], None)}
    assert unsolved_rows([first, second], 1.0) == ["b"]
    assert unsolved_rows([first, second], 0.9) == []


@given(scores)
def test_the_range_is_stretched_only_by_rewards_outside_it(version: dict[str, RowScores]) -> None:
    assert covering_range(UNIT_RANGE, [version]) == UNIT_RANGE
    outside = version | {"z": RowScores([-2.0], 3.0)}
    assert covering_range(UNIT_RANGE, [outside]) == RewardRange(-2.0, 3.0)


def test_100_rows_with_4_samples_each_give_an_interval_of_8_hundredths() -> None:
    version = {str(number): RowScores([1.0, 0.0, 1.0, 0.0], None) for number in range(100)}
    mean = summarize(version, UNIT_RANGE).mean
    assert mean is not None
    assert mean.high - mean.mean == pytest.approx(0.076, abs=0.001)
