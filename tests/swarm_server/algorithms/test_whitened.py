import math
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_server.algorithms.outcomes import ALL, GROUP_A, GROUP_B, LONE, firsts

from fakevllm_server.algorithms import ESTIMATORS
from fakevllm_server.algorithms.advantage_input import AdvantageSpec, Outcome, per_token
from fakevllm_server.algorithms.whitened import whiten

SPEC = AdvantageSpec()


def test_whitened_rewards_equal_the_expected_values() -> None:
    """The expected values are those of verl's reinforce_plus_plus_baseline.

    It uses the raw reward for the only episode of a group.
    """
    centred = [0.625, -0.375, 0.125, -0.375, 0.0, 0.0, 0.7]
    assert firsts(whiten(per_token(ALL, centred), SPEC.std_floor)) == pytest.approx(
        [1.283985, -0.949032, 0.167476, -0.949032, -0.111651, -0.111651, 1.451461], abs=1e-5
    )


def test_the_only_episode_of_a_group_is_not_whitened() -> None:
    estimate = ESTIMATORS["reinforce_plus_plus_baseline"]
    assert estimate(ALL, SPEC) == [*estimate([*GROUP_A, *GROUP_B], SPEC), [0.0] * 3]
    assert estimate(LONE, SPEC) == [[0.0] * 3]


def test_without_a_discount_all_tokens_of_an_episode_have_the_same_advantage() -> None:
    advantages = firsts(ESTIMATORS["reinforce_plus_plus"](ALL, SPEC))
    assert advantages[0] == advantages[4] == max(advantages)
    assert advantages[1] == advantages[3] == min(advantages)


def test_a_discount_lowers_the_advantages_of_early_tokens() -> None:
    outcomes = [Outcome("g", 1.0, 3), Outcome("h", 0.0, 3)]
    first, second = ESTIMATORS["reinforce_plus_plus"](outcomes, AdvantageSpec(gamma=0.5))
    assert first[0] < first[1] < first[2]
    assert first[2] - first[1] == pytest.approx(2 * (first[1] - first[0]))
    assert len(set(second)) == 1


def test_a_penalty_lowers_the_return_of_its_token_and_of_those_before() -> None:
    assert Outcome("g", 1.0, 3, penalties=(0.0, 0.5, 0.25)).returns(1.0) == [0.25, 0.25, 0.75]
    assert Outcome("g", 1.0, 3, penalties=(0.0, 0.5, 0.25)).returns(0.5) == [-0.0625, -0.125, 0.75]


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_equal_rewards_give_exact_zeros(name: str) -> None:
    tied = [Outcome("g", 0.3, 2) for _ in range(7)]
    assert ESTIMATORS[name](tied, SPEC) == [[0.0, 0.0]] * 7


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_an_empty_step_and_a_single_token_are_accepted(name: str) -> None:
    assert ESTIMATORS[name]([], SPEC) == []
    assert ESTIMATORS[name]([Outcome("g", 1.0, 0), Outcome("g", 0.0, 1)], SPEC) == [[], [0.0]]


@given(
    st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=4), min_size=2, max_size=6).filter(
        lambda rows: max(chain(*rows)) - min(chain(*rows)) > 1
    )
)
def test_whitened_values_have_mean_0_and_standard_deviation_1(rows: list[list[float]]) -> None:
    values = list(chain(*whiten(rows, 1e-9)))
    assert math.isclose(sum(values), 0.0, abs_tol=1e-9)
    assert math.isclose(sum(v * v for v in values) / (len(values) - 1), 1.0, rel_tol=1e-9)
