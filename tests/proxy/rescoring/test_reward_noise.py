"""Noise is what differs between the rewards of equal answers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.rescoring.comparison import HookComparison, RescoredGroup
from fakevllm.rescoring.reward_noise import RewardNoise

RIGHT, WRONG = "7", "8"
groups = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(-5, 5)), min_size=1), min_size=1
)


def test_a_hook_that_gives_equal_answers_equal_rewards_has_no_noise() -> None:
    noise = RewardNoise()
    noise.add([RIGHT, RIGHT, WRONG], [1.0, 1.0, 0.0])
    assert noise.share == 0.0
    assert noise.without_noise(0.5) == 0.5


def test_without_equal_answers_the_noise_is_unknown() -> None:
    noise = RewardNoise()
    noise.add([RIGHT, WRONG], [1.0, 0.0])
    assert noise.share is None
    assert noise.without_noise(0.5) is None


def test_equal_answers_of_different_groups_are_not_compared() -> None:
    noise = RewardNoise()
    noise.add([RIGHT, WRONG], [1.0, 0.0])
    noise.add([RIGHT, WRONG], [0.0, 1.0])
    assert noise.share is None


def test_rewards_that_are_only_noise_correct_nothing() -> None:
    noise = RewardNoise()
    noise.add([RIGHT, RIGHT, RIGHT], [1.0, 0.0, 1.0])
    assert noise.share == 1.0
    assert noise.without_noise(0.1) is None


@pytest.mark.parametrize("flipped", [0.1, 0.3, 0.35])
def test_a_hook_with_random_errors_agrees_fully_without_its_noise(flipped: float) -> None:
    rng = random.Random(0)
    comparison = HookComparison()
    for number in range(2000):
        answers = [rng.choice([RIGHT, WRONG]) for _ in range(8)]
        old = [float(answer == RIGHT) for answer in answers]
        new = [1 - reward if rng.random() < flipped else reward for reward in old]
        comparison.add(RescoredGroup(f"g{number}", old, new, answers=answers))
    assert comparison.correlation_within == pytest.approx(1 - 2 * flipped, abs=0.03)
    assert comparison.correlation_without_noise == pytest.approx(1.0, abs=0.05)


def test_a_systematic_error_is_no_noise() -> None:
    comparison = HookComparison()
    answers = ["7", "7", "8", "9"]
    old, odd = [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]
    comparison.add(RescoredGroup("g1", old, odd, answers=answers))
    assert comparison.noise_share == 0.0
    assert comparison.correlation_without_noise == comparison.correlation_within


@given(groups)
def test_the_share_of_the_noise_is_between_0_and_1(
    several: list[list[tuple[str, float]]],
) -> None:
    noise = RewardNoise()
    for group in several:
        noise.add([answer for answer, _ in group], [reward for _, reward in group])
    share = noise.share
    assert share is None or 0 <= share <= 1
    corrected = noise.without_noise(0.9)
    assert corrected is None or 0.9 <= corrected <= 1
