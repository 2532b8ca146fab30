"""Tasks of active clients of which some episodes never come."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from swarm_server.local_backend import LocalBackend
from swarm_server.loops import JOB, Run
from swarm_server.pools import episode_of, pool_of
from swarm_server.samples import call
from swarm_server.training.intakes import Lives

from fakevllm_adapters.protocol.swarm import EndEpisodeRequest, WorkflowOutput
from fakevllm_server.episodes import waiting_tasks
from fakevllm_server.episodes.pool import Pool
from fakevllm_server.episodes.waiting_tasks import CompletedTask

HOUR_S = 3600.0


def waiting(*rewards: float, num_repeat: int = 4, **settings: Any) -> Pool:
    """With one task, seen at time 0."""
    pool = pool_of(num_repeat=num_repeat, **settings)
    for reward in rewards:
        episode_of(pool, "t", reward, 0)
    assert pool.complete_expired(now=0.0) == []
    return pool


def only(found: list[CompletedTask]) -> CompletedTask:
    (one,) = found
    return one


def test_a_partial_task_trains_with_what_it_has_once_its_time_is_over() -> None:
    pool = waiting(1.0, 0.0, 1.0)
    assert pool.complete_expired(now=HOUR_S) == [] and not pool.is_due
    left = only(pool.complete_expired(now=HOUR_S + 1))
    assert (left.reason, left.group.rewards) == (None, [1.0, 0.0, 1.0])
    assert pool.take_excluded_counts()["partial_groups"] == 1
    assert pool.take(version=0).groups == [left.group]
    assert pool.complete_expired(now=9 * HOUR_S) == []


def test_each_episode_gives_its_task_the_whole_time_again() -> None:
    pool = waiting(1.0)
    pool.complete_expired(now=HOUR_S - 1)
    episode_of(pool, "t", 0.0, 0)
    assert pool.complete_expired(now=HOUR_S + 1) == []
    assert pool.complete_expired(now=2 * HOUR_S + 1) == []
    assert only(pool.complete_expired(now=2 * HOUR_S + 2)).reason is None


@pytest.mark.parametrize(
    ("rewards", "settings", "reason"),
    [
        ((1.0,), {}, "fewer_than_two_rewards"),
        ((1.0, 0.0), {"partial_tasks": "drop"}, "partial"),
        ((1.0, 1.0), {"filter_groups": "drop"}, "tied"),
    ],
)
def test_a_partial_task_that_is_not_to_train_is_dropped_by_name(
    rewards: tuple[float, ...], settings: dict[str, Any], reason: str
) -> None:
    pool = waiting(*rewards, **settings)
    left = only(pool.complete_expired(now=HOUR_S + 1))
    assert left.reason == reason
    assert pool.take_dropped() == {left.group.group_id: reason}
    assert pool.waiting == {
        "finished_groups": 0,
        "open_groups": 0,
        "partial_tasks": 0,
        "tokens": 0,
    }


@pytest.mark.parametrize(("name", "bound"), [("MAX_TASKS", 2), ("MAX_TOKENS", 10)])
def test_what_waits_for_its_task_is_bounded_and_what_falls_out_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, bound: int
) -> None:
    """An episode has five tokens. The task goes that has been silent for longest."""
    monkeypatch.setattr(waiting_tasks, name, bound)
    pool = pool_of(num_repeat=4)
    for task in ("a", "b"):
        episode_of(pool, task, 1.0, 0)
    assert pool.complete_expired(now=0.0) == []
    episode_of(pool, "c", 1.0, 0)
    left = only(pool.complete_expired(now=1.0))
    assert (left.group.group_id.partition("#")[0], left.reason) == ("task:a", "pool_full")
    assert (pool.waiting["partial_tasks"], pool.waiting["tokens"]) == (2, 10)


async def test_what_became_of_a_partial_task_is_on_disk(tmp_path: Path) -> None:
    lives = Lives(tmp_path / "run")
    lives.next(num_repeat=3, entropy_coeff=0.0)
    for task, rewards in (("pair", (1.0, 0.0)), ("lone", (1.0,))):
        for reward in rewards:
            await lives.end((await lives.played()).uuid, reward, task)
    lives.now.intake.sweep(0.0)
    lives.now.intake.sweep(HOUR_S + 1)
    lives.now.tell_dropped()
    states = {name.partition("#")[0]: told for name, told in lives.groups.items()}
    assert states == {
        "task:pair": ("pooled", None),
        "task:lone": ("dropped", "fewer_than_two_rewards"),
    }
    assert lives.now.log.drops == {"fewer_than_two_rewards": 1}
    lives.kill()
    assert [group.rewards for group in lives.now.waiting().groups] == [[1.0, 0.0]]
    assert lives.now.waiting().samples == []
    lives.now.close()


async def test_a_task_that_waits_when_the_server_dies_waits_on_in_its_next_life(
    tmp_path: Path,
) -> None:
    lives = Lives(tmp_path / "run")
    lives.next(num_repeat=3)
    for reward in (1.0, 0.0):
        await lives.end((await lives.played()).uuid, reward)
    lives.now.intake.sweep(0.0)
    lives.kill()
    lives.now.intake.sweep(9 * HOUR_S)  # its first look
    assert lives.now.intake.pool.num_finished == 0
    lives.now.intake.sweep(10 * HOUR_S + 1)
    assert lives.now.intake.pool.num_finished == 1
    lives.now.close()


async def test_a_loop_trains_what_there_is_of_a_task(tmp_path: Path) -> None:
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
