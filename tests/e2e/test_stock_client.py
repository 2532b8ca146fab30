"""A test of training with a client that sends the same requests as AgentJet's client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.e2e.processes import Processes, wait_until
from tests.e2e.stock_client import StockClient
from tests.e2e.swarm_wire import small_job

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
