"""A test of training with a client that sends the same requests as AgentJet's client."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fakevllm import SwarmClient
from tests.e2e.processes import Processes, wait_until
from tests.e2e.stock_client import StockClient
from tests.e2e.swarm_wire import ROLLING, small_job

NUM_REPEAT, BATCH = 2, 2


def test_a_stock_client_trains_two_steps_with_agentjets_yaml(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    client = StockClient(server.url)
    try:
        client.start(small_job(BATCH, NUM_REPEAT))

        def play(number: int) -> bool:
            claimed = client.begin_episode()
            answer = client.wire.chat(claimed, "[[say yes]]").json()
            assert answer["choices"][0]["message"]["content"] == "yes"
            task, reward = f"task {number // NUM_REPEAT}", float(number % NUM_REPEAT)
            return client.end_episode(claimed["episode_uuid"], task, reward)

        with ThreadPoolExecutor(3 * BATCH * NUM_REPEAT) as threads:  # more threads than slots
            assert all(threads.map(play, range(2 * BATCH * NUM_REPEAT)))
        first = 1
        wait_until(
            lambda: client.wire.get("/get_engine_status")["global_step"] == first + 2, 20, "2 steps"
        )
        entries = client.wire.get("/get_run_log")["entries"]
        trained = [group["group_id"] for entry in entries for group in entry.get("groups", [])]
        assert len(trained) == 2 * BATCH
        assert client.unknown == [] and "ENGINE.OFFLINE" not in client.statuses[1:]
        assert client.wire.post("/stop_engine") == {"success": True, "failure_reason": ""}
        wait_until(lambda: client.wire.status == "ENGINE.OFFLINE", 20)
    finally:
        client.close()


@contextlib.contextmanager
def stock_clients(url: str, num: int) -> Generator[list[StockClient]]:
    clients = [StockClient(url) for _ in range(num)]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def play_task(client: StockClient, task: str) -> None:
    for reward in (0.0, 1.0):
        claimed = client.begin_episode()
        assert client.wire.chat(claimed, "hi").status_code == 200
        assert client.end_episode(claimed["episode_uuid"], task, reward)


@pytest.mark.parametrize("who", ["any_client_agree", "all_clients_agree"])
def test_a_stock_client_that_agreed_sees_the_step_although_the_step_is_short(
    processes: Processes, who: str
) -> None:
    server = processes.server("--backend", "fake")
    method = f"rollout_until_{who}_sync_weight"
    job = small_job(99, NUM_REPEAT, ajet__swarm_mode_sample_collection_method=method)
    with stock_clients(server.url, 2) as (first, second), SwarmClient(server.url) as own:
        first.start(job)
        with ThreadPoolExecutor(2) as threads:
            play_task(first, "one")
            play_task(second, "two")
            agreed = threads.submit(first.agree_sync_weight)
            if who == "all_clients_agree":
                assert threads.submit(second.agree_sync_weight).result()
            wait_until(lambda: own.get_global_step() == 2, 20)
            # The engine has gone on, which fakevllm's own client sees.
            wait_until(lambda: own.get_engine_status()[0] == ROLLING, 20)
            assert first.wire.status == "ENGINE.ROLLING_POST"
            assert agreed.result()
            play_task(second, "three")
            wait_until(lambda: first.wire.status == ROLLING, 60)
        assert [one for one in first.statuses if one != "ENGINE.BOOTING"][-4:] == [
            ROLLING,
            "ENGINE.ROLLING_POST",
            "ENGINE.WEIGHT_SYNCING",
            ROLLING,
        ]
