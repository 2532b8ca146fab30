import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_server.algorithms.outcomes import ALL, GROUP_A, LONE, firsts, group

from fakevllm_server.algorithms import ESTIMATORS
from fakevllm_server.algorithms.advantage_input import AdvantageSpec, Outcome

SPEC = AdvantageSpec()
WITHOUT_STD = AdvantageSpec(norm_adv_by_std_in_grpo=False)
GROUPED = ["grpo", "rloo", "opo", "grpo_passk", "gpg"]
rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def advantages_of(name: str, values: list[float], spec: AdvantageSpec = SPEC) -> list[float]:
    return firsts(ESTIMATORS[name](group(values), spec))


@pytest.mark.parametrize(
    ("name", "spec", "expected"),
    [
        ("grpo", SPEC, [1.305582, -0.783349, 0.261116, -0.783349, 0, 0, 0]),
        ("grpo", WITHOUT_STD, [0.625, -0.375, 0.125, -0.375, 0, 0, 0]),
        ("rloo", SPEC, [0.833333, -0.5, 0.166667, -0.5, 0, 0, 0]),
        ("gpg", SPEC, [0.875, -0.525, 0.175, -0.525, 0, 0, 0]),
        ("opo", SPEC, [0.75, -0.25, 0.25, -0.25, 0, 0, 0]),
        ("grpo_passk", SPEC, [1.044466, 0, 0, 0, 0, 0, 0]),
        ("grpo_passk", WITHOUT_STD, [0.5, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_advantages_equal_the_expected_values(
    name: str, spec: AdvantageSpec, expected: list[float]
) -> None:
    """The expected values are verl's, except for the only episode of a group.

    verl uses its raw reward.
    """
    assert firsts(ESTIMATORS[name](ALL, spec)) == pytest.approx(expected, abs=1e-5)


def test_every_trained_token_gets_its_episodes_advantage() -> None:
    assert [len(tokens) for tokens in ESTIMATORS["grpo"](ALL, SPEC)] == [2, 3, 1, 4, 2, 2, 3]


def test_the_order_of_episodes_does_not_change_their_advantages() -> None:
    order = [4, 0, 6, 1, 5, 2, 3]
    mixed = ESTIMATORS["grpo"]([ALL[at] for at in order], SPEC)
    apart = ESTIMATORS["grpo"](ALL, SPEC)
    assert mixed == [apart[at] for at in order]


def test_an_episode_masked_from_the_loss_still_counts_in_the_baseline() -> None:
    masked = [*GROUP_A[:3], Outcome("a", 0.0, 0)]
    assert ESTIMATORS["grpo"](masked, SPEC) == [*ESTIMATORS["grpo"](GROUP_A, SPEC)[:3], []]


def test_a_group_of_masked_episodes_has_no_advantages() -> None:
    masked = [Outcome("a", 1.0, 0), Outcome("a", 0.0, 0)]
    for name in GROUPED:
        assert ESTIMATORS[name](masked, SPEC) == [[], []]


def test_the_std_floor_limits_the_advantages_of_a_near_tie() -> None:
    assert advantages_of("grpo", [0.5, 0.5, 0.5, 0.501]) == pytest.approx(
        [-0.005, -0.005, -0.005, 0.015], abs=1e-9
    )
    assert advantages_of("grpo_passk", [0.5, 0.5, 0.5, 0.501]) == pytest.approx(
        [0, 0, 0, 0.02], abs=1e-9
    )


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("value", [0.3, 0.1, 1 / 3])
def test_equal_rewards_give_exact_zeros(name: str, value: float) -> None:
    assert advantages_of(name, [value] * 7) == [0.0] * 7


@pytest.mark.parametrize("name", GROUPED)
def test_the_only_episode_of_a_group_has_advantage_0(name: str) -> None:
    assert firsts(ESTIMATORS[name](LONE, SPEC)) == [0.0]


def test_a_tie_for_the_best_has_only_zeros() -> None:
    assert advantages_of("grpo_passk", [1.0, 0.0, 1.0]) == [0.0, 0.0, 0.0]


def test_episodes_weigh_by_length_in_opos_baseline() -> None:
    outcomes = [Outcome("g", 1.0, 1), Outcome("g", 0.0, 9)]
    assert ESTIMATORS["opo"](outcomes, SPEC) == [[0.9], [-0.1] * 9]


def test_penalties_are_subtracted_from_the_reward() -> None:
    penalized = [Outcome("g", 1.5, 2, penalties=(0.25, 0.25)), Outcome("g", 0.0, 1)]
    plain = [Outcome("g", 1.0, 2), Outcome("g", 0.0, 1)]
    assert ESTIMATORS["grpo"](penalized, SPEC) == ESTIMATORS["grpo"](plain, SPEC)


@given(rewards)
def test_advantages_sum_to_zero_and_keep_the_order(values: list[float]) -> None:
    for name in ("grpo", "rloo"):
        advantages = advantages_of(name, values)
        assert math.isclose(sum(advantages), 0.0, abs_tol=1e-6)
        ranked = sorted(range(len(values)), key=lambda i: values[i])
        assert [advantages[i] for i in ranked] == sorted(advantages)


@given(rewards, st.floats(0.1, 10))
def test_above_the_floor_the_scale_of_rewards_does_not_matter(
    values: list[float], scale: float
) -> None:
    if statistics.stdev(values) * min(scale, 1.0) < 0.1:
        return
    scaled = advantages_of("grpo", [value * scale for value in values])
    assert scaled == pytest.approx(advantages_of("grpo", values), abs=1e-6)
