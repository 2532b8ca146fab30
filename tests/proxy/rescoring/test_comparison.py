"""The comparison of old and new rewards counts what changes for training and for apps."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.rescoring.comparison import HookComparison, RescoredGroup, Rewards

REWARDS = st.lists(st.one_of(st.none(), st.integers(-3, 3).map(float)), min_size=2, max_size=6)


def compare(*groups: RescoredGroup) -> HookComparison:
    comparison = HookComparison()
    for group in groups:
        comparison.add(group)
    return comparison


def group(old: Rewards, new: Rewards | None, served: int | None = 0) -> RescoredGroup:
    return RescoredGroup("g", old, new, None if new is not None else "hook_raised: oops", served)


@given(st.lists(REWARDS, max_size=8))
def test_hooks_that_give_the_same_rewards_change_nothing(groups: list[Rewards]) -> None:
    comparison = compare(*(group(rewards, rewards, _best(rewards)) for rewards in groups))
    assert (comparison.old.mean, comparison.old.best) == (comparison.new.mean, comparison.new.best)
    assert comparison.num_reordered == comparison.num_gained == comparison.num_lost == 0
    assert comparison.num_served_otherwise == 0
    for correlation in (comparison.correlation, comparison.correlation_within):
        assert correlation is None or correlation == pytest.approx(1.0)


def _best(rewards: Rewards) -> int | None:
    known = [(reward, -i) for i, reward in enumerate(rewards) if reward is not None]
    return -max(known)[1] if known else None


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=3, max_size=30))
def test_the_correlation_is_pearsons(pairs: list[tuple[float, float]]) -> None:
    old, new = ([float(value) for value in column] for column in zip(*pairs, strict=True))
    comparison = compare(group(old, new))
    if min(statistics.pvariance(old), statistics.pvariance(new)) > 1e-3:
        expected = statistics.correlation(old, new)
        assert comparison.correlation == pytest.approx(expected, abs=1e-6)


def test_hooks_that_reverse_each_group_are_found_although_the_means_of_groups_agree() -> None:
    groups = [group([low, low + 0.1], [low + 0.1, low], served=1) for low in (0.0, 5.0, 10.0)]
    comparison = compare(*groups)
    assert comparison.correlation == pytest.approx(1.0, abs=0.01)
    assert comparison.correlation_within == pytest.approx(-1.0)
    assert comparison.num_reordered == comparison.num_served_otherwise == 3


def test_a_signal_is_gained_by_broken_ties_and_lost_by_new_ties() -> None:
    comparison = compare(group([0, 0], [0, 1]), group([0, 1], [1, 1]), group([0, 1], [0, 2]))
    assert (comparison.num_gained, comparison.num_lost) == (1, 1)
    assert (comparison.old.num_with_signal, comparison.new.num_with_signal) == (2, 2)
    assert comparison.num_reordered == 0


def test_groups_whose_highest_reward_is_shared_are_counted_for_both_versions() -> None:
    comparison = compare(group([1, 1, 0], [1, 0, 0]), group([2, 1], [3, 3]), group([0, 0], [1, 1]))
    assert (comparison.old.num_tied, comparison.new.num_tied) == (2, 2)
    assert comparison.as_json()["old"]["num_tied"] == 2


def test_only_siblings_with_both_rewards_count_for_the_means() -> None:
    comparison = compare(group([1.0, None, 0.0], [1.0, 5.0, 0.0]))
    assert (comparison.old.mean, comparison.new.mean) == (0.5, 0.5)
    assert comparison.new.best == 1.0


def test_a_greedy_sibling_does_not_count_for_the_mean_of_all() -> None:
    comparison = compare(RescoredGroup("g", [1.0, 0.0, 0.0], [4.0, 2.0, 0.0], greedy=0))
    assert (comparison.old.mean, comparison.new.mean) == (0.0, 1.0)
    assert comparison.new.best == 4.0


def test_a_served_sibling_without_a_new_reward_would_not_be_served() -> None:
    comparison = compare(group([1, 0], [None, 0.5]), group([1, 0], [None, None]))
    assert (comparison.num_served, comparison.num_served_otherwise) == (1, 1)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.integers(2, 5)), max_size=20))
def test_groups_that_both_hooks_tie_have_no_correlation_within(
    ties: list[tuple[float, float, int]],
) -> None:
    comparison = compare(*(group([old] * num, [new] * num) for old, new, num in ties))
    assert comparison.correlation_within is None


def test_groups_that_cannot_be_compared_are_counted_and_left_out() -> None:
    comparison = compare(group([0, 1], None), group([None, None], [0, 1]), group([0, 1], [0, 1]))
    assert comparison.num_groups == 3
    assert comparison.failures == {"hook_raised": 1}
    assert (comparison.num_without_old, comparison.num_compared) == (1, 1)
    assert (comparison.new.mean, comparison.new.best) == (0.5, 1.0)
