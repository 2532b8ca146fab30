"""Tests of jobs in AgentJet's format, sent to a server with the fake engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.adapters.job.ajet_jobs import stock
from tests.e2e.processes import Process, Processes, wait_until


def post(server: Process, path: str, body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=20)
    assert answer.status_code == 200, answer.text
    return answer.json()


def status(server: Process) -> str:
    return httpx.get(f"{server.url}/get_engine_status").json()["engine_status"]


@pytest.fixture
def server(processes: Processes) -> Process:
    return processes.server("--backend", "fake")


def test_a_job_runs_on_the_engine_that_the_server_was_started_with(server: Process) -> None:
    synced = post(server, "/sync_train_config", {"yaml_as_string": stock()})
    assert synced["success"], synced
    started = post(server, "/start_engine", {})
    assert started["success"], started
    wait_until(lambda: status(server) == "ENGINE.ROLLING", 20)
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert model["id"] == "fake"
    job = httpx.get(f"{server.url}/get_train_config").json()
    assert (job["batch_size"], job["num_repeat"], job["n_gpu"]) == (32, 4, 8)


def test_settings_without_effect_are_in_the_reply_and_in_the_log(server: Process) -> None:
    sent = {"yaml_as_string": stock(ajet__rollout__top_p=0.9)}
    warnings = post(server, "/sync_train_config", sent)["warnings"]
    for expected in (
        "ajet.rollout.top_p = 0.9 is not read",
        "backbone = 'verl' is without effect: the server was started with --backend fake",
        "model = 'Qwen/Qwen2.5-7B-Instruct' is without effect: the fake engine has no model",
        "n_gpu = 8 is without effect",
    ):
        assert len([line for line in warnings if line.startswith(expected)]) == 1, warnings
    wait_until(lambda: all(line in server.log for line in warnings), 60)


def test_a_job_that_cannot_work_is_refused_with_the_fix(server: Process) -> None:
    sent = {"yaml_as_string": stock(ajet__trainer_common__n_gpus_per_node=7)}
    refused = post(server, "/sync_train_config", sent)
    assert not refused["success"]
    assert refused["error"] == (
        "batch_size 32 times num_repeat 4 is 128 episodes a step, which n_gpu 7 does not divide: "
        "change one of them"
    )
    assert post(server, "/start_engine", {})["error"] == "No training config found"
