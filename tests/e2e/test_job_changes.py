"""A client stops the engine and starts it with another job."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import httpx
import pytest

from fakevllm import SwarmClient, Task, TrainJob, WorkflowOutput
from tests.e2e.processes import Processes, wait_until

WAIT_S = 20.0


@pytest.fixture
def client(processes: Processes) -> Generator[SwarmClient]:
    with SwarmClient(processes.server("--backend", "fake").url) as client:
        yield client


def start(client: SwarmClient, **settings: Any) -> None:
    """Start the engine with a job, after stopping an engine that runs."""
    given: dict[str, Any] = {"batch_size": 1, "num_repeat": 4, "lr": 0.1}
    job = TrainJob(**given | settings)
    if client.get_engine_status()[0] != "ENGINE.OFFLINE":
        client.stop_engine()
    client.auto_sync_train_config_and_start_engine(job)


def play(client: SwarmClient, *rewards: float, task: str = "0") -> None:
    """Run one episode of a task for each reward."""
    for reward in rewards:
        uuid, access = client.begin_episode()
        with access.openai() as app:
            app.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
        client.end_episode(Task(task_id=task), uuid, WorkflowOutput(reward=reward))


def status(client: SwarmClient) -> dict[str, Any]:
    return httpx.get(f"{client.server_url}/get_engine_status").json()


@pytest.mark.parametrize(
    "change",
    [{"overlong_buffer_len": 2, "max_response_length": 8}, {"use_kl_in_reward": True}],
    ids=str,
)
def test_episodes_of_the_job_before_never_complete_a_group_of_another_job(
    client: SwarmClient, change: dict[str, Any]
) -> None:
    start(client)
    play(client, 0.0, 1.0, 0.0)
    start(client, **change)
    wait_until(lambda: status(client)["dropped"] == {"other_job": 3}, WAIT_S)
    play(client, 1.0)
    assert status(client)["waiting"]["partial_tasks"] == 1
    assert client.get_global_step() == 1
    play(client, 0.0, 1.0, 0.0)
    wait_until(lambda: client.get_global_step() == 2, WAIT_S)
    entries = httpx.get(f"{client.server_url}/get_run_log").json()["entries"]
    (step,) = [entry for entry in entries if entry["kind"] == "step"]
    assert step["metrics"]["calls"] == 4


@pytest.mark.parametrize("change", [{"lr": 0.2}, {"model": "another"}], ids=str)
def test_a_job_that_only_trains_in_another_way_continues_with_what_waits(
    client: SwarmClient, change: dict[str, Any]
) -> None:
    """The fake engine has no weights, so the model that the job names changes nothing."""
    start(client)
    play(client, 0.0, 1.0, 0.0)
    start(client, **change)
    play(client, 1.0)
    wait_until(lambda: client.get_global_step() == 2, WAIT_S)
    assert status(client)["dropped"] == {}
