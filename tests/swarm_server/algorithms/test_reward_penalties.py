import pytest

from fakevllm_server.algorithms.advantage_input import Outcome
from fakevllm_server.algorithms.reward_penalties import kl_penalties, overlong_penalty


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1), (120, -2)],
)
def test_overlong_penalties_equal_the_expected_values(num_tokens: int, expected: float) -> None:
    assert overlong_penalty(num_tokens, 100, 20, 1.0) == expected
    assert overlong_penalty(num_tokens, 100, 20, 0.5) == expected / 2


def test_kl_penalties_lower_the_score_if_the_policy_departs_from_its_reference() -> None:
    penalties = kl_penalties([-1.0, -0.5, -2.0], [-1.2, -0.9, -1.5], 0.1)
    assert penalties == pytest.approx([0.02, 0.04, -0.05])
    assert Outcome("g", 1.0, 3, penalties=penalties).score == pytest.approx(0.99)
