import pytest

from fakevllm_server.algorithms import ESTIMATORS
from fakevllm_server.algorithms.advantage_input import AdvantageSpec, Outcome
from fakevllm_server.algorithms.remax import NoBaseline

SPEC = AdvantageSpec()
remax = ESTIMATORS["remax"]


def with_greedy(rewards: list[float], baseline: float) -> list[Outcome]:
    return [Outcome("g", baseline, 0, is_greedy=True)] + [Outcome("g", r, 2) for r in rewards]


def test_advantages_equal_the_expected_values() -> None:
    advantages = remax(with_greedy([1.0, 0.0, 0.5, 0.0], 0.5), SPEC)
    assert advantages == [[], [0.5] * 2, [-0.5] * 2, [0.0] * 2, [-0.5] * 2]


def test_the_baseline_is_the_mean_of_several_greedy_answers() -> None:
    outcomes = [Outcome("g", 1.0, 1, is_greedy=True), *with_greedy([1.0], 0.0)]
    assert remax(outcomes, SPEC) == [[0.0], [], [0.5, 0.5]]


def test_a_penalty_lowers_the_return_of_its_token_and_of_those_before() -> None:
    sampled = Outcome("g", 1.0, 2, penalties=(0.5, 0.25))
    assert remax([Outcome("g", 0.5, 0, is_greedy=True), sampled], SPEC)[1] == [-0.25, 0.25]


def test_a_group_without_a_greedy_answer_raises_an_error_with_its_id() -> None:
    with pytest.raises(NoBaseline, match=r"greedy answer, and 1 groups have none \(h\)"):
        remax([*with_greedy([1.0], 0.0), Outcome("h", 1.0, 2)], SPEC)
