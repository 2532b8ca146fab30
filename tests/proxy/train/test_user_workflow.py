"""Checking what a workflow returns."""

from __future__ import annotations

import pytest

from fakevllm import WorkflowOutput
from fakevllm.errors import UserError
from fakevllm.train.user_workflow import parse_workflow_output


@pytest.mark.parametrize("returned", [1, 0.5, True, WorkflowOutput(reward=1.0)])
def test_a_number_and_an_output_with_a_reward_are_accepted(returned: object) -> None:
    assert isinstance(parse_workflow_output(returned, "agent.py:run").reward, float)


@pytest.mark.parametrize(
    "returned", [None, "1", float("nan"), WorkflowOutput(), WorkflowOutput(reward=[1.0])]
)
def test_any_other_result_is_an_error_of_the_workflow(returned: object) -> None:
    with pytest.raises(UserError, match=r"^agent\.py:run returned .*: return the reward"):
        parse_workflow_output(returned, "agent.py:run")
