"""Wrong arguments raise ValueError in one line before anything is sent."""

from __future__ import annotations

import math
from typing import Any

import pytest
from proxy.sdk.scripted_calls import run_call

from fakevllm.sdk import episode_calls
from fakevllm.sdk.types import ThrottlePolicy, WorkflowOutput
from fakevllm_adapters.protocol.swarm import Task


@pytest.mark.parametrize("policy", [
    {"share": 0}, {"share": -0.5}, {"share": 1.5}, {"share": math.nan}, {"share": "half"},
    {"ratio": 0}, {"ratio": -1}, {"ratio": math.nan}, {"ratio": math.inf},
    {"expected_batch_size": 0}, {"shear": 0.5},
])  # fmt: skip
def test_a_wrong_throttle_policy_is_reported_with_its_field(policy: dict[str, Any]) -> None:
    ((name, value),) = policy.items()
    with pytest.raises(ValueError) as raised:
        ThrottlePolicy(**policy)
    message = str(raised.value)
    assert message.startswith(f"ThrottlePolicy: {name}: ") and message.endswith(f", got {value!r}")
    assert "\n" not in message


@pytest.mark.parametrize("reward", ["good", "1.5", math.nan, -math.inf, 1e308, 10**400, {}])
def test_a_reward_that_is_not_a_number_is_reported_once(reward: Any) -> None:
    with pytest.raises(ValueError) as raised:
        WorkflowOutput(reward=reward)
    assert str(raised.value).startswith("WorkflowOutput: reward: ")
    assert ";" not in str(raised.value) and "\n" not in str(raised.value)


def test_true_counts_as_a_reward_of_one() -> None:
    assert WorkflowOutput(reward=True).reward == 1.0


@pytest.mark.parametrize("seconds", [-1, 0, 1e9, math.nan, math.inf, "soon"])
def test_a_claim_with_a_wrong_timeout_is_not_sent(seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"^discard_episode_timeout: Input should be"):
        run_call(episode_calls.begin("me", "train", seconds, None), [])


def test_a_task_id_that_is_too_long_is_not_sent() -> None:
    task = Task(task_id="x" * 10_240)
    with pytest.raises(ValueError, match=r"^task_id: String should have at most 1000 characters"):
        run_call(episode_calls.end("me", task, "u1", WorkflowOutput(reward=1.0)), [])
