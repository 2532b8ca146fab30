import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_server.algorithms.advantages import grpo

FLOOR = 0.05
rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def test_golden_group_of_four() -> None:
    assert grpo([1.0, 0.0, 0.5, 0.0], FLOOR) == pytest.approx(
        [1.305582, -0.783349, 0.261116, -0.783349], abs=1e-5
    )


def test_a_near_tie_is_not_blown_up() -> None:
    assert grpo([0.5, 0.5, 0.5, 0.501], FLOOR) == pytest.approx(
        [-0.005, -0.005, -0.005, 0.015], abs=1e-9
    )


@pytest.mark.parametrize("value", [0.3, 0.1, 1 / 3])
def test_equal_rewards_give_exact_zeros(value: float) -> None:
    assert grpo([value] * 7, FLOOR) == [0.0] * 7


def test_a_lone_reward_teaches_nothing() -> None:
    assert grpo([0.7], FLOOR) == [0.0]


@given(rewards)
def test_advantages_sum_to_zero_and_keep_the_order(values: list[float]) -> None:
    advantages = grpo(values, FLOOR)
    assert math.isclose(sum(advantages), 0.0, abs_tol=1e-6)
    ranked = sorted(range(len(values)), key=lambda i: values[i])
    assert [advantages[i] for i in ranked] == sorted(advantages)


@given(rewards, st.floats(0.1, 10))
def test_above_the_floor_the_scale_of_rewards_does_not_matter(
    values: list[float], scale: float
) -> None:
    if statistics.stdev(values) * min(scale, 1.0) < 0.1:
        return
    scaled = grpo([value * scale for value in values], FLOOR)
    assert scaled == pytest.approx(grpo(values, FLOOR), abs=1e-6)
