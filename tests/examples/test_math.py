"""The math example: its files, its calculator, and both of its agents on the fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator
from pathlib import Path

import pytest

from examples.math import agent
from fakevllm import SwarmClient, Task, TrainJob, WorkflowOutput
from fakevllm.train.config import load
from fakevllm.train.training_inputs import load_inputs
from fakevllm.train.user_workflow import load_function
from fakevllm_adapters.job.validation import check_job
from fakevllm_server.config.job_warnings import job_warnings
from fakevllm_server.config.model import ServerConfig
from tests.e2e.processes import Processes

MATH = Path(__file__).parents[2] / "examples/math"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[SwarmClient]:
    with Processes(tmp_path_factory.mktemp("math")) as started:
        server = started.server("--backend", "fake")
        with SwarmClient(server.url) as client:
            client.auto_sync_train_config_and_start_engine(TrainJob())
            yield client


def test_the_demo_configuration_names_a_valid_agent_and_dataset() -> None:
    inputs = load_inputs(load(MATH / "math.yaml"))
    assert len(inputs.tasks) == len(inputs.eval_tasks) == 64
    assert all(
        agent.is_same(
            agent.calculator("+".join(agent.STATED_SUM.findall(task.main_query)[0])), answer
        )
        for task in inputs.tasks
        if (answer := task.metadata["answer"])
    )


def test_the_configuration_for_a_real_model_is_valid_and_causes_no_warnings(
    tmp_path: Path,
) -> None:
    settings = load(MATH / "gsm8k.yaml")
    for name in (settings.train.workflow, settings.train.dataset, settings.train.eval_dataset):
        load_function(name or "", MATH)
    assert settings.train.epochs == 1 and settings.warnings == []
    assert job_warnings(check_job(settings.job), ServerConfig("vllm", tmp_path)) == []


@pytest.mark.parametrize(
    ("reply", "reward", "num_calls"),
    [("3 plus 4 is 9.", 1.0, 1.0), ("The answer is 9.", 0.0, 0.0), ("It is 7.", 1.0, 0.0)],
)
def test_a_stated_sum_calls_the_calculator_whose_number_counts(
    client: SwarmClient, reply: str, reward: float, num_calls: float
) -> None:
    task = Task(task_id=reply, main_query=f"[[say {reply}]]", metadata={"answer": "7"})
    with client.episode(task, episode_type="eval") as episode:
        output = agent.run(task, episode.access)
    assert output == WorkflowOutput(reward=reward, log_metrics={"calculator": num_calls})


@pytest.mark.parametrize(
    ("num_calls", "reply", "reward"),
    [
        (1, "#### 72", 1.0),
        (2, "#### 72\nThe calculator was used 2 times.", 1.0),
        (1, "It is 72.", 0.0),
        (agent.MAX_TURNS, "#### 72", 0.0),  # no turn is left for this answer
    ],
)
def test_a_real_models_calls_get_results_and_the_number_after_the_mark_counts(
    client: SwarmClient, num_calls: int, reply: str, reward: float
) -> None:
    call = f"[[call calculator {json.dumps({'expression': '48/2 + 48'})}]]"
    question = f"{call * num_calls}[[say {reply}]]"
    task = Task(task_id="clips", main_query=question, metadata={"answer": "48 / 2 = 24\n#### 72"})
    with client.episode(task, episode_type="eval") as episode:
        output = asyncio.run(agent.solve(task, episode.access))
    assert output == WorkflowOutput(reward=reward, log_metrics={"calculator": float(num_calls)})


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"expression": "48/2 + 48"}', "72"),
        ('{"expression": "1/0"}', "error: "),
        ('{"expression": "2**999999"}', "error: only numbers"),
        ('{"expression": "__import__(\'os\')"}', "error: only numbers"),
        ('{"expression": "1 +"}', "error: "),
        ('{"sum": 1}', "error: "),
        ("[]", "error: "),
        ("{", "error: "),
    ],
)
def test_a_call_gets_the_value_or_an_error_message(arguments: str, result: str) -> None:
    assert agent.call_calculator(arguments).startswith(result)
