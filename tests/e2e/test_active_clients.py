"""Tests of claims, calls and ends of episodes, written as plain requests of the swarm protocol."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.processes import Process, Processes, wait_until

JOB = "job: {num_repeat: 2, batch_size: 1, lr: 0.5}"


@pytest.fixture
def server(processes: Processes) -> Process:
    server = processes.server("--backend", "fake")
    call(server, "/sync_train_config", yaml_as_string=JOB)
    call(server, "/start_engine")
    wait_until(lambda: status(server) == "ENGINE.ROLLING", 20)
    return server


def call(server: Process, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=20)
    return answer.json() if answer.status_code == 200 else (answer.status_code, answer.json())


def status(server: Process) -> str:
    return httpx.get(f"{server.url}/get_engine_status").json()["engine_status"]


def claim(server: Process, client: str = "me", kind: str = "train") -> Any:
    return call(
        server, "/claim_episode", client_uuid=client, episode_type=kind, discard_episode_timeout=60
    )


def end(server: Process, claimed: Any, reward: Any, client: str = "me") -> Any:
    output = {
        "reward": reward,
        "metadata": {"task_id": "t"},
        "log_metrics": {"tools": [1.0, 3.0]},
    }
    return call(
        server,
        "/end_episode",
        client_uuid=client,
        episode_uuid=claimed["episode_uuid"],
        task_id="t",
        workflow_output=output,
    )


def ask(claimed: Any, text: str) -> str:
    with openai.OpenAI(
        base_url=claimed["openai_base_url"], api_key=claimed["openai_api_key"], max_retries=0
    ) as app:
        answer = app.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": text}]
        )
    return answer.choices[0].message.content or ""


def test_two_episodes_of_a_task_with_several_calls_each_make_a_step(server: Process) -> None:
    for reward in (1.0, 0.0):
        episode = claim(server)
        assert episode["success"] and episode["openai_base_url"].endswith("/v1")
        assert ask(episode, "[[say one]]") == "one"
        assert ask(episode, "[[say two]]") == "two"
        assert end(server, episode, reward) == {"success": True}
    wait_until(lambda: len(run_log(server)) == 1, 60)
    (entry,) = run_log(server)
    assert entry["metrics"]["calls"] == 4
    assert entry["metrics"]["train_tools"] == 2.0
    (trained,) = entry["groups"]
    assert trained["group_id"] == f"task:t#{episode['episode_uuid']}"
    assert trained["siblings"] == [0, 1]
    better, worse = trained["advantages"]
    assert better > 0 and worse == -better


def run_log(server: Process) -> Any:
    return httpx.get(f"{server.url}/get_run_log").json()["entries"]


def test_a_repeated_end_is_acknowledged_and_counts_once(server: Process) -> None:
    episode = claim(server)
    ask(episode, "hi")
    assert end(server, episode, 1.0) == end(server, episode, 1.0) == {"success": True}
    assert run_log(server) == []


@pytest.mark.parametrize("reward", [None, [1.0, 2.0]])
def test_a_reward_that_is_not_a_number_is_refused_and_the_end_may_be_repeated(
    server: Process, reward: Any
) -> None:
    episode = claim(server)
    ask(episode, "hi")
    code, body = end(server, episode, reward)
    assert code == 400 and "must be one number" in body["detail"]
    assert end(server, episode, 1.0) == {"success": True}


def test_refusals_have_the_texts_of_the_protocol(server: Process) -> None:
    episode = claim(server)
    code, body = end(server, episode, 1.0, client="somebody else")
    assert code == 404 and "is claimed by different client: me" in body["detail"]
    code, body = end(server, {"episode_uuid": "nope"}, 1.0)
    assert (code, body["detail"]) == (400, "Episode nope not found.")
    code, body = claim(server, kind="magic")
    assert (code, body["detail"]) == (400, "Unknown episode_type: magic")
    code, body = call(server, "/start_engine")
    assert body["detail"].startswith("Cannot start engine when engine is not offline.")
    code, body = call(server, "/sync_train_config", yaml_as_string=JOB)
    assert body["detail"].startswith("Engine is already started. Call `stop_engine` first")


def test_the_key_of_an_ended_episode_is_refused(server: Process) -> None:
    episode = claim(server)
    assert can_continue(server, episode)
    end(server, episode, 1.0)
    assert not can_continue(server, episode)
    with pytest.raises(openai.NotFoundError):
        ask(episode, "hi")


def can_continue(server: Process, claimed: Any) -> bool:
    uuid = claimed["episode_uuid"]
    return call(server, "/can_continue_episode", client_uuid="me", episode_uuid=uuid)[
        "can_continue"
    ]


async def test_the_server_accepts_more_clients_than_the_soft_limit_of_open_files(
    processes: Processes,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        server = processes.server("--backend", "fake")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    opened = [asyncio.open_connection("127.0.0.1", server.port) for _ in range(100)]
    streams = await asyncio.gather(*opened)
    for _, to_server in streams:  # all connections are open
        to_server.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    async with asyncio.timeout(20):
        for from_server, to_server in streams:
            assert (await from_server.readline()).startswith(b"HTTP/1.1 200")
            to_server.close()


def test_a_claim_at_an_offline_engine_is_refused_with_the_way_to_start_it(
    processes: Processes,
) -> None:
    server = processes.server("--backend", "fake")
    refused = claim(server)
    assert not refused["success"]
    assert refused["fail_cause"].startswith(
        "Engine not ready. Current status: [ENGINE.OFFLINE]. Please start the engine first."
    )
    assert call(server, "/start_engine") == {
        "success": False,
        "pid": None,
        "error": "No training config found",
    }
    assert call(server, "/stop_engine")["success"]


def test_a_stopped_engine_is_offline_and_can_be_started_again(server: Process) -> None:
    call(server, "/stop_engine")
    assert status(server) == "ENGINE.OFFLINE"
    call(server, "/start_engine")
    wait_until(lambda: status(server) == "ENGINE.ROLLING", 20)
