"""Training steps beside episodes, with `async_steps`: on the wire, and with the embedded engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import httpx

from fakevllm import SwarmClient, Task, TrainJob
from tests.e2e.processes import Process, Processes, wait_until
from tests.e2e.swarm_wire import ROLLING, Wire

WAIT_S = 120.0
NUM_STEPS = 4


def steps(server: Process) -> list[Any]:
    entries = httpx.get(f"{server.url}/get_run_log").json()["entries"]
    return [entry for entry in entries if entry["kind"] == "step"]


def test_the_status_has_the_fields_that_agentjets_client_and_ours_read(
    processes: Processes,
) -> None:
    server = processes.server("--backend", "fake")
    job = TrainJob(num_repeat=2, batch_size=1, async_steps=1)
    with Wire(server.url) as wire, SwarmClient(server.url, verbose=False) as client:
        client.auto_sync_train_config_and_start_engine(job)
        status = wire.get("/get_engine_status")
        assert status["engine_status"] == ROLLING
        assert isinstance(status["global_step"], int)
        assert (status["async_steps"], status["async_step_runs"]) == (1, False)
        assert client.get_engine_status()[0] == ROLLING
        assert client.status().is_between_steps and client.status().max_backlog == 1
        claimed = [wire.claim() for _ in range(4)]
        refused = wire.post("/claim_episode", wire.claim_body())
        assert refused["success"] is False
        assert refused["fail_cause"].startswith(
            "No available episodes to claim. Try again (maybe 1 minute) later."
        )
        for number, episode in enumerate(claimed):
            assert wire.chat(episode).status_code == 200
            ended = wire.end(episode["episode_uuid"], f"t{number // 2}", number % 2)
            assert ended["success"] is True
        wait_until(lambda: client.get_global_step() == 3, WAIT_S)
        assert wire.status == ROLLING
        assert wire.claim()["success"]


def test_the_embedded_engine_answers_episodes_while_it_trains(processes: Processes) -> None:
    server = processes.server("--model", "demo")
    job = TrainJob(
        num_repeat=2,
        batch_size=2,
        lr=1e-4,
        async_steps=2,
        max_staleness=2,
        total_training_steps=NUM_STEPS,
    )
    numbers = count()
    statuses = set[tuple[str, bool]]()

    def play(client: SwarmClient) -> None:
        """Play episodes until the last step is trained."""
        while client.get_global_step() <= NUM_STEPS:
            number = next(numbers)
            with client.episode(Task(task_id=f"t{number // 2}")) as episode:
                with episode.openai() as app:
                    question = f"What is {number // 2 % 7} plus 3?"
                    app.chat.completions.create(
                        model="any",
                        messages=[{"role": "user", "content": question}],
                        max_tokens=24,
                    )
                episode.end(reward=float(number % 2))
                status = client.status()
                statuses.add((status.engine_status.value, status.async_step_runs))

    with SwarmClient(server.url, verbose=False) as client:
        client.auto_sync_train_config_and_start_engine(job)
        with ThreadPoolExecutor(6) as threads:
            running = [threads.submit(play, client) for _ in range(6)]
        for each in running:
            each.result()
    assert {status for status, _ in statuses} == {ROLLING}
    assert (ROLLING, True) in statuses, "no episode ended during a step"
    metrics = [entry["metrics"] for entry in steps(server)]
    assert len(metrics) == NUM_STEPS
    assert max(each["staleness_max"] for each in metrics) in (1, 2)
    assert {each["untrainable_tokens"] for each in metrics} == {0}
    assert {each["token_fidelity"] for each in metrics} == {1.0}
