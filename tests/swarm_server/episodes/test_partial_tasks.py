"""Tasks of active clients that never get all their episodes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from swarm_server.local_backend import LocalBackend
from swarm_server.loops import JOB, Run
from swarm_server.pools import episode_of, pool_of
from swarm_server.samples import call
from swarm_server.training.intake_server import IntakeServer

from fakevllm_adapters.protocol.swarm import EndEpisodeRequest, WorkflowOutput
from fakevllm_server.episodes import incomplete_tasks
from fakevllm_server.episodes.group_pool import Pool
from fakevllm_server.episodes.incomplete_tasks import CompletedTask

HOUR_S = 3600.0


def pool_with_task(*rewards: float, num_repeat: int = 4, **settings: Any) -> Pool:
    """Return a pool with one partial task, whose time limit starts at 0."""
    pool = pool_of(num_repeat=num_repeat, **settings)
    for reward in rewards:
        episode_of(pool, "t", reward, 0)
    assert pool.complete_expired(now=0.0) == []
    return pool


def single(found: list[CompletedTask]) -> CompletedTask:
    (one,) = found
    return one


def test_a_partial_task_is_trained_after_its_time_limit() -> None:
    pool = pool_with_task(1.0, 0.0, 1.0)
    assert pool.complete_expired(now=HOUR_S) == [] and not pool.is_due
    completed = single(pool.complete_expired(now=HOUR_S + 1))
    assert (completed.reason, completed.group.rewards) == (None, [1.0, 0.0, 1.0])
    assert pool.take_excluded_counts()["partial_groups"] == 1
    assert pool.take(version=0).groups == [completed.group]
    assert pool.complete_expired(now=9 * HOUR_S) == []


def test_each_episode_restarts_the_time_limit_of_its_task() -> None:
    pool = pool_with_task(1.0)
    pool.complete_expired(now=HOUR_S - 1)
    episode_of(pool, "t", 0.0, 0)
    assert pool.complete_expired(now=HOUR_S + 1) == []
    assert pool.complete_expired(now=2 * HOUR_S + 1) == []
    assert single(pool.complete_expired(now=2 * HOUR_S + 2)).reason is None


@pytest.mark.parametrize(
    ("rewards", "settings", "reason"),
    [
        ((1.0,), {}, "fewer_than_two_rewards"),
        ((1.0, 0.0), {"partial_tasks": "drop"}, "partial"),
        ((1.0, 1.0), {"filter_groups": "drop"}, "tied"),
    ],
)
def test_a_partial_task_that_is_not_trained_is_dropped_with_a_reason(
    rewards: tuple[float, ...], settings: dict[str, Any], reason: str
) -> None:
    pool = pool_with_task(*rewards, **settings)
    completed = single(pool.complete_expired(now=HOUR_S + 1))
    assert completed.reason == reason
    assert pool.take_dropped() == {completed.group.group_id: reason}
    assert pool.waiting == {
        "finished_groups": 0,
        "open_groups": 0,
        "partial_tasks": 0,
        "tokens": 0,
    }


@pytest.mark.parametrize(("name", "bound"), [("MAX_TASKS", 2), ("MAX_TOKENS", 10)])
def test_waiting_tasks_are_limited_and_the_oldest_is_dropped_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, name: str, bound: int
) -> None:
    """An episode has five tokens. The task whose last episode is oldest is dropped."""
    monkeypatch.setattr(incomplete_tasks, name, bound)
    pool = pool_of(num_repeat=4)
    for task in ("a", "b"):
        episode_of(pool, task, 1.0, 0)
    assert pool.complete_expired(now=0.0) == []
    episode_of(pool, "c", 1.0, 0)
    completed = single(pool.complete_expired(now=1.0))
    assert (completed.group.group_id.partition("#")[0], completed.reason) == ("task:a", "pool_full")
    assert (pool.waiting["partial_tasks"], pool.waiting["tokens"]) == (2, 10)


async def test_the_outcome_of_a_partial_task_is_on_disk(tmp_path: Path) -> None:
    server = IntakeServer(tmp_path / "run")
    server.restart(num_repeat=3, entropy_coeff=0.0)
    for task, rewards in (("pair", (1.0, 0.0)), ("lone", (1.0,))):
        for reward in rewards:
            await server.end((await server.play()).uuid, reward, task)
    server.process.intake.sweep(0.0)
    server.process.intake.sweep(HOUR_S + 1)
    server.process.record_drops()
    states = {name.partition("#")[0]: state for name, state in server.groups.items()}
    assert states == {
        "task:pair": ("pooled", None),
        "task:lone": ("dropped", "fewer_than_two_rewards"),
    }
    assert server.process.log.drops == {"fewer_than_two_rewards": 1}
    server.kill_and_restart()
    assert [group.rewards for group in server.process.waiting().groups] == [[1.0, 0.0]]
    assert server.process.waiting().samples == []
    server.process.close()


async def test_a_waiting_task_survives_a_kill_and_its_time_limit_restarts(
    tmp_path: Path,
) -> None:
    server = IntakeServer(tmp_path / "run")
    server.restart(num_repeat=3)
    for reward in (1.0, 0.0):
        await server.end((await server.play()).uuid, reward)
    server.process.intake.sweep(0.0)
    server.kill_and_restart()
    server.process.intake.sweep(9 * HOUR_S)  # the first sweep after the restart
    assert server.process.intake.pool.num_finished == 0
    server.process.intake.sweep(10 * HOUR_S + 1)
    assert server.process.intake.pool.num_finished == 1
    server.process.close()


async def test_the_loop_trains_a_partial_task(tmp_path: Path) -> None:
    run = Run(tmp_path, LocalBackend(), JOB.model_copy(update={"num_repeat": 3}))
    await run.rolling()
    for reward in (1.0, 0.0):
        episode = await run.intake.claim("me", "train", 1e6)
        output = WorkflowOutput(reward=reward, metadata={"task_id": "t"})
        end = EndEpisodeRequest(
            client_uuid="me", episode_uuid=episode.uuid, task_id="t", workflow_output=output
        )
        await run.intake.add_episode_call(episode, call())
        await run.intake.end_episode(end, reward, run.loop.closed_reason)
    run.intake.sweep(time.monotonic())
    run.intake.sweep(time.monotonic() + HOUR_S + 1)
    run.loop.notify()
    await run.until(lambda: bool(run.trained_groups))
    (step,) = [entry for entry in run.log.entries_after(0) if entry.kind == "step"]
    assert step.metrics["partial_groups"] == 1 and len(step.groups) == 1
    await run.stop()
