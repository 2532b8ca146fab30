"""Tests of programs as in AgentJet's documentation, with only their imports changed."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import httpx as requests  # scripts import requests, whose `post`, `json` and `headers` are the same
import pytest

from fakevllm.ajet import (
    AgentJetJob,
    AjetTaskReader,
    HuggingfaceDatRepo,
    OpenaiBaseUrlAndApiKey,
    PeriodicDrainThreadPoolExecutor,
    RouterTaskReader,
    SwarmClient,
    SwarmThrottlePolicy,
    Task,
    TaskCountLimitedThreadPoolExecutor,
    WorkflowOutput,
    auto_train_with_dataset,
    run_episodes_until_all_complete,
)
from tests.e2e.processes import Process, Processes, wait_until

NUM_REPEAT, BATCH_SIZE = 2, 2
WAIT_S = 20.0


def make_job(name: str = "test", **changes: Any) -> AgentJetJob:
    return AgentJetJob(
        algorithm="grpo",
        project_name="ajet-swarm",
        experiment_name=name,
        n_gpu=1,
        model="/models/mine",
        batch_size=BATCH_SIZE,
        num_repeat=NUM_REPEAT,
        **changes,
    )


def steps(server: Process) -> int:
    entries = httpx.get(f"{server.url}/get_run_log").json()["entries"]
    return len([entry for entry in entries if entry["kind"] == "step"])


@pytest.fixture
def server(processes: Processes) -> Process:
    return processes.server("--backend", "fake")


@pytest.fixture
def swarm_worker(server: Process) -> Generator[SwarmClient]:
    with SwarmClient(server.url, auto_start_swarm_server=True) as client:
        yield client


@pytest.fixture
def dataset(tmp_path: Path) -> RouterTaskReader:
    rows = [{"question": f"[[say {n}]]", "answer": f"so #### {n % 2}"} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RouterTaskReader(
        reader_type="huggingface_dat_repo",
        reader_config=AjetTaskReader(
            huggingface_dat_repo=HuggingfaceDatRepo(dataset_path=str(tmp_path))
        ),
    )


def execute_agent(task: Task, api_baseurl_key: OpenaiBaseUrlAndApiKey) -> WorkflowOutput:
    base_url, api_key = api_baseurl_key.base_url, api_baseurl_key.api_key
    response = requests.post(
        f"{base_url}/chat/completions",
        json={
            "model": "fill_whatever_model",
            "messages": [
                {"role": "system", "content": "Sums."},
                {"role": "user", "content": task.main_query},
            ],
        },
        headers={"Authorization": f"Bearer {api_key}"},
    )
    final = response.json()["choices"][0]["message"]["content"]
    is_success = final == task.metadata["answer"].split("####")[-1].strip()
    return WorkflowOutput(
        reward=1.0 if is_success else 0.0, is_success=is_success, metadata={"final": final}
    )


def test_batches_of_episodes_are_run_until_all_are_complete(
    server: Process, swarm_worker: SwarmClient, dataset: RouterTaskReader
) -> None:
    yaml_job = make_job()
    swarm_worker.sync_train_config(yaml_job)
    swarm_worker.start_engine()

    def rollout(task: Task) -> Any:
        episode_uuid, api_baseurl_key = swarm_worker.begin_episode()
        workflow_output = execute_agent(task, api_baseurl_key)
        swarm_worker.end_episode(task, episode_uuid, workflow_output)
        swarm_worker.print_rollout_stat()
        return workflow_output.reward

    results: list[Any] = []
    next_batch: list[Task] = []
    for _, task in enumerate(dataset.generate_training_tasks()):
        for _ in range(NUM_REPEAT):
            next_batch.append(task)
            if len(next_batch) >= (BATCH_SIZE * NUM_REPEAT):
                results += run_episodes_until_all_complete(
                    next_batch, func=rollout, auto_retry=True
                )
                next_batch.clear()
    assert results == [1.0] * 4 + [0.0] * 4
    wait_until(lambda: steps(server) == 2, WAIT_S)


def test_training_with_periodic_drains_continues_after_an_aborted_episode(
    server: Process, swarm_worker: SwarmClient, dataset: RouterTaskReader
) -> None:
    swarm_worker.auto_sync_train_config_and_start_engine(make_job())
    episode_uuid, _ = swarm_worker.begin_episode(discard_episode_timeout=240)
    swarm_worker.abort_episode(episode_uuid)

    def rollout(task: Task) -> Any:
        episode_uuid, api_baseurl_key = swarm_worker.begin_episode()
        workflow_output = execute_agent(task, api_baseurl_key)
        swarm_worker.end_episode(task, episode_uuid, workflow_output)
        return workflow_output.reward

    executor = PeriodicDrainThreadPoolExecutor(
        workers=BATCH_SIZE * NUM_REPEAT, max_parallel=64, auto_retry=True
    )
    for task in dataset.generate_training_tasks():
        for _ in range(NUM_REPEAT):
            executor.submit_with_periodic_drain(fn=rollout, task=task)
    wait_until(lambda: steps(server) == 2, WAIT_S)  # scripts end without a shutdown
    executor.shutdown()


def test_groups_of_episodes_are_trained_with_a_limit_on_their_number(
    server: Process, swarm_worker: SwarmClient, dataset: RouterTaskReader
) -> None:
    swarm_worker.auto_sync_train_config_and_start_engine(make_job())

    def rollout(task: Task) -> Any:
        episode_uuid, api_baseurl_key = swarm_worker.begin_episode(discard_episode_timeout=120)
        workflow_output = execute_agent(task, api_baseurl_key)
        swarm_worker.end_episode(task, episode_uuid, workflow_output)
        return workflow_output.reward

    executor = TaskCountLimitedThreadPoolExecutor(
        max_parallel_groups=BATCH_SIZE, max_workers=64, auto_retry=True
    )
    swarm_worker.add_entering_weight_sync_callback(executor.on_entering_weight_sync)
    futures = [
        executor.submit_group(
            task_id=task.task_id, fn=rollout, args_list=[{"task": task} for _ in range(NUM_REPEAT)]
        )
        for task in dataset.generate_training_tasks()
    ]
    executor.shutdown()
    assert [[future.result() for future in group] for group in futures] == [
        [1.0, 1.0],
        [1.0, 1.0],
        [0.0, 0.0],
        [0.0, 0.0],
    ]
    wait_until(lambda: steps(server) == 2, WAIT_S)


def test_two_models_are_trained_by_one_agent(
    server: Process, processes: Processes, swarm_worker: SwarmClient, dataset: RouterTaskReader
) -> None:
    second = processes.server("--backend", "fake", folder="second")
    with SwarmClient(second.url) as other_worker:
        swarm_worker.auto_sync_train_config_and_start_engine(make_job("7b-model"))
        other_worker.auto_sync_train_config_and_start_engine(make_job("14b-model"))

        def rollout(task: Task) -> float:
            uuid_7b, access_7b = swarm_worker.begin_episode(discard_episode_timeout=240)
            uuid_14b, access_14b = other_worker.begin_episode(discard_episode_timeout=240)
            output_7b = execute_agent(task, access_7b)
            output_14b = execute_agent(task, access_14b)
            swarm_worker.end_episode(task, uuid_7b, output_7b)
            other_worker.end_episode(task, uuid_14b, output_14b)
            return (output_7b.reward + output_14b.reward) / 2.0  # pyright: ignore

        tasks = dataset.get_training_tasks()
        easy = [
            task for task in tasks if task.metadata["answer"] == f"so #### {task.main_query[6]}"
        ]
        batch = [task for task in easy[:BATCH_SIZE] for _ in range(NUM_REPEAT)]
        assert run_episodes_until_all_complete(batch, func=rollout) == [1.0] * 4
    wait_until(lambda: (steps(server), steps(second)) == (1, 1), WAIT_S)


def test_a_throttled_episode_and_a_dataset_in_one_call_are_trained(
    server: Process, swarm_worker: SwarmClient, dataset: RouterTaskReader
) -> None:
    swarm_worker.auto_sync_train_config_and_start_engine(make_job())
    task = Task(task_id="mine", main_query="[[say 1]]", metadata={"answer": "#### 1"})
    policy = SwarmThrottlePolicy(
        ratio=1.5,
        expected_batch_size=BATCH_SIZE,
        expected_num_repeat=NUM_REPEAT,
        current_task_id=task.task_id,
    )
    episode_uuid, access = swarm_worker.begin_episode(throttle_policy=policy)
    assert swarm_worker.get_episode_buffer()[0].optional_task_id == "mine"
    swarm_worker.end_episode(task, episode_uuid, execute_agent(task, access))
    auto_train_with_dataset(
        dataset.generate_training_tasks(),
        swarm_worker,
        execute_agent,
        local_grpo_n=NUM_REPEAT,
        remote_batch_size=BATCH_SIZE,
    )
    wait_until(lambda: steps(server) == 2, WAIT_S)


def test_a_job_survives_a_round_trip_through_yaml(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    make_job(lr=3e-4).dump_job_as_yaml(str(file))
    again = make_job()
    again.build_job_from_yaml(str(file))
    assert again == make_job(lr=3e-4)
