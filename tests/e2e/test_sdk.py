"""Tests of the SDK with a real server: claims, training, and crashes of the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from fakevllm import (
    AsyncSwarmClient,
    EpisodeAccess,
    EpisodeLost,
    PeriodicDrainThreadPoolExecutor,
    RandomReader,
    SwarmClient,
    SwarmError,
    SwarmServerOfflineError,
    Task,
    TrainJob,
    WorkflowOutput,
    auto_train_with_dataset,
    episodes_together,
    run_episodes_until_all_complete,
    start_engines,
)
from fakevllm_server.types import crash_points
from tests.e2e.processes import Process, Processes, wait_until

JOB = TrainJob(num_repeat=2, batch_size=2, lr=0.5)
TASK = Task(task_id="t")
WAIT_S = 20.0


@pytest.fixture
def server(processes: Processes) -> Process:
    return processes.server("--backend", "fake")


@pytest.fixture
def client(server: Process) -> Generator[SwarmClient]:
    with SwarmClient(server.url) as client:
        client.auto_sync_train_config_and_start_engine(JOB)
        yield client


def steps(server: Process) -> list[Any]:
    entries = httpx.get(f"{server.url}/get_run_log").json()["entries"]
    return [entry for entry in entries if entry["kind"] == "step"]


def answer(access: EpisodeAccess, text: str = "[[say yes]]") -> str:
    with access.openai() as app:
        reply = app.chat.completions.create(
            model="any", messages=[{"role": "user", "content": text}]
        )
    return reply.choices[0].message.content or ""


def test_a_dataset_trains_one_step_per_drained_batch(server: Process, client: SwarmClient) -> None:
    drawn = iter(range(1000))

    def rollout(task: Task) -> float:
        uuid, access = client.begin_episode()
        assert answer(access) == "yes"
        output = WorkflowOutput(reward=float(next(drawn) % 2))
        client.end_episode(task, uuid, output)
        return output.reward if isinstance(output.reward, float) else 0.0

    executor = PeriodicDrainThreadPoolExecutor(workers=4, max_parallel=4)
    for task in RandomReader(6):
        for _ in range(2):
            executor.submit_with_periodic_drain(fn=rollout, task=task)
    executor.shutdown()
    wait_until(lambda: client.get_global_step() == 4, WAIT_S)
    assert len(steps(server)) == 3


def test_a_batch_run_at_once_is_trained_and_its_weight_sync_calls_the_callback(
    server: Process, client: SwarmClient
) -> None:
    synced = threading.Event()
    client.add_entering_weight_sync_callback(synced.set)

    def rollout(task: Task) -> str:
        with client.episode(task) as episode:
            text = answer(episode.access)
            episode.end(reward=0.5, is_success=True)
        return text

    tasks = [Task(task_id=str(number // 2)) for number in range(4)]
    assert run_episodes_until_all_complete(tasks, rollout) == ["yes"] * 4
    assert synced.wait(WAIT_S)


def test_an_agent_that_fails_aborts_its_episode(server: Process, client: SwarmClient) -> None:
    uuid = ""
    with pytest.raises(ZeroDivisionError), client.episode(TASK) as episode:
        uuid = episode.uuid
        raise ZeroDivisionError
    assert not client.can_continue_episode(uuid)
    with pytest.raises(EpisodeLost, match="not in claimed status"):
        client.end_episode(TASK, uuid, WorkflowOutput(reward=1.0))
    again, _ = client.begin_episode()
    assert again[:28] == uuid[:28] and again != uuid


def test_a_block_without_an_end_aborts_its_episode(client: SwarmClient) -> None:
    with client.episode(TASK) as episode:
        assert client.can_continue_episode(episode.uuid)
    assert not client.can_continue_episode(episode.uuid)


def test_an_end_waits_for_the_restart_of_a_killed_server_and_counts_once(
    server: Process, client: SwarmClient
) -> None:
    uuid, access = client.begin_episode()
    answer(access)
    server.kill()
    ending = threading.Thread(
        target=client.end_episode, args=(TASK, uuid, WorkflowOutput(reward=1.0))
    )
    ending.start()
    server.start()
    ending.join(WAIT_S)
    assert not ending.is_alive()
    client.end_episode(TASK, uuid, WorkflowOutput(reward=1.0))
    with client.episode(TASK) as episode:
        answer(episode.access)
        episode.end(reward=0.0)
    _train(client, "other")
    wait_until(lambda: len(steps(server)) == 1, WAIT_S)
    assert [len(group["siblings"]) for group in steps(server)[0]["groups"]] == [2, 2]


def test_a_claim_whose_reply_is_lost_in_a_crash_succeeds_after_the_restart(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRASH_AT", "claim.after_commit")
    server = processes.server("--backend", "fake")
    with SwarmClient(server.url) as client:
        client.auto_sync_train_config_and_start_engine(JOB)
        with ThreadPoolExecutor(1) as pool:
            beginning = pool.submit(client.begin_episode)
            wait_until(lambda: server.returncode == crash_points.EXIT_CODE, WAIT_S)
            server.kill()
            monkeypatch.delenv("CRASH_AT")
            server.start()
            uuid, access = beginning.result(WAIT_S)
        running = client.get_rollout_stat().running_episode_details
        assert running is not None and list(running) == [uuid]
        assert answer(access)
        client.end_episode(TASK, uuid, WorkflowOutput(reward=1.0))


def test_episodes_after_the_last_step_are_warned_about_once(
    server: Process, caplog: pytest.LogCaptureFixture
) -> None:
    job = JOB.model_copy(update={"total_training_steps": 1})
    with SwarmClient(server.url) as client:
        client.auto_sync_train_config_and_start_engine(job)
        for task_id in ("one", "other"):
            _train(client, task_id)
        wait_until(lambda: len(steps(server)) == 1, WAIT_S)
        for task_id in ("late", "later"):
            _train(client, task_id)
    warnings = [text for text in caplog.messages if "nothing more is trained" in text]
    assert len(warnings) == 1 and "of task late: the run has taken its last step" in warnings[0]


def test_a_block_that_ends_after_its_client_was_closed_logs_no_warning(
    server: Process, caplog: pytest.LogCaptureFixture
) -> None:
    client = SwarmClient(server.url)
    client.auto_sync_train_config_and_start_engine(JOB)
    with client.episode(TASK):
        client.close()
        server.kill()
    assert not [text for text in caplog.messages if "was not aborted" in text]


def _train(client: SwarmClient, task_id: str) -> None:
    for reward in (0.0, 1.0):
        with client.episode(Task(task_id=task_id)) as episode:
            answer(episode.access)
            episode.end(reward=reward)


def test_an_engine_may_be_stopped_twice_and_a_claim_then_fails_at_once(
    client: SwarmClient,
) -> None:
    for _ in range(2):
        client.stop_engine()
        assert client.get_engine_status()[0] == "ENGINE.OFFLINE"
    with pytest.raises(SwarmServerOfflineError):
        client.begin_episode()


def test_the_error_of_an_engine_that_cannot_start_has_the_reason(processes: Processes) -> None:
    server = processes.server("--backend", "embedded")
    with SwarmClient(server.url) as client, pytest.raises(SwarmError, match="No model"):
        client.auto_sync_train_config_and_start_engine(JOB)


def test_the_error_of_an_engine_that_is_refused_at_once_has_the_reason(
    processes: Processes,
) -> None:
    server = processes.server("--model", "demo", "--engine-arg=--device=abacus")
    with SwarmClient(server.url) as client:
        with pytest.raises(SwarmServerOfflineError, match="abacus"):
            client.auto_sync_train_config_and_start_engine(JOB, timeout_s=WAIT_S)
        with pytest.raises(SwarmServerOfflineError, match="abacus"):
            client.start_engine(timeout_s=WAIT_S)


def test_a_training_loop_ends_when_the_engine_is_stopped(client: SwarmClient) -> None:
    num_played = 0

    def execute_agent(task: Task, access: EpisodeAccess) -> WorkflowOutput:
        nonlocal num_played
        num_played += 1
        client.stop_engine()
        return WorkflowOutput(reward=1.0)

    with pytest.raises(SwarmServerOfflineError):
        auto_train_with_dataset(RandomReader(1000), client, execute_agent, max_parallel=1)
    assert num_played == 1


def test_tasks_of_one_event_loop_are_trained(server: Process, client: SwarmClient) -> None:
    async def rollout(async_client: AsyncSwarmClient, number: int) -> str:
        async with (
            async_client.episode(Task(task_id=f"a{number // 2}")) as episode,
            episode.openai() as app,
        ):
            reply = await app.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "[[say yes]]"}]
            )
            await episode.end(reward=float(number % 2))
        return reply.choices[0].message.content or ""

    async def run() -> list[str]:
        async with AsyncSwarmClient(server.url) as async_client:
            assert (await async_client.get_engine_status())[0] == "ENGINE.ROLLING"
            return await asyncio.gather(*(rollout(async_client, number) for number in range(4)))

    assert asyncio.run(run()) == ["yes"] * 4
    wait_until(lambda: len(steps(server)) == 1, WAIT_S)


def test_an_async_agent_that_is_cancelled_aborts_its_episode(
    server: Process, client: SwarmClient
) -> None:
    async def run() -> str:
        async with AsyncSwarmClient(server.url) as async_client:
            begun = asyncio.Event()
            uuids: list[str] = []

            async def rollout() -> None:
                async with async_client.episode(TASK) as episode:
                    uuids.append(episode.uuid)
                    begun.set()
                    await asyncio.Event().wait()

            agent = asyncio.create_task(rollout())
            await begun.wait()
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)
            return uuids[0]

    assert not client.can_continue_episode(asyncio.run(run()))


def test_a_workflow_function_and_a_dataset_are_enough_to_train(
    server: Process, client: SwarmClient
) -> None:
    drawn = iter(range(1000))

    def execute_agent(task: Task, access: EpisodeAccess) -> WorkflowOutput:
        answer(access)
        return WorkflowOutput(reward=float(next(drawn) % 2))

    auto_train_with_dataset(
        RandomReader(4), client, execute_agent, local_grpo_n=2, remote_batch_size=2
    )
    wait_until(lambda: len(steps(server)) == 2, WAIT_S)


# --- two servers


@pytest.fixture
def two(processes: Processes) -> Generator[list[tuple[Process, SwarmClient]]]:
    servers = [processes.server("--backend", "fake", folder=name) for name in ("one", "two")]
    with SwarmClient(servers[0].url) as one, SwarmClient(servers[1].url) as other:
        start_engines([(one, JOB), (other, JOB)])
        yield [(servers[0], one), (servers[1], other)]


def test_episodes_of_two_servers_end_together(two: list[tuple[Process, SwarmClient]]) -> None:
    clients = [client for _, client in two]
    for number in range(4):
        task = Task(task_id=str(number // 2))
        with episodes_together(clients, task) as (planner, executor):
            answer(planner.access)
            answer(executor.access)
            planner.end(reward=float(number % 2))
            executor.end(reward=1.0 - number % 2)
    for server, _ in two:
        wait_until(lambda server=server: len(steps(server)) == 1, WAIT_S)


def test_if_one_of_two_claims_is_lost_both_episodes_are_aborted(
    two: list[tuple[Process, SwarmClient]],
) -> None:
    clients = [client for _, client in two]
    with (
        pytest.raises(EpisodeLost),
        episodes_together(clients, TASK) as (planner, executor),
    ):
        planner.end(reward=1.0)
        executor.end(reward=1.0)
        clients[1].abort_episode(executor.uuid)
    assert not clients[0].can_continue_episode(planner.uuid)
    pools = [httpx.get(f"{server.url}/get_run_log").json()["entries"] for server, _ in two]
    assert pools == [[], []]


def test_the_error_of_engines_that_cannot_start_has_their_address_but_no_key(
    two: list[tuple[Process, SwarmClient]],
) -> None:
    server, client = two[0]
    with (
        SwarmClient("http://me:secret@127.0.0.1:9") as unreachable,
        pytest.raises(SwarmError, match=r"127\.0\.0\.1:9: No swarm server") as error,
    ):
        start_engines([(client, JOB), (unreachable, JOB)])
    assert "secret" not in str(error.value)
    assert server.returncode is None
