"""What the run's log tells of evaluations: each once, with its end, at the step that was served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from swarm_server.samples import call

from fakevllm_adapters.protocol.swarm import (
    EndEpisodeRequest,
    EndGroupRequest,
    LogEntry,
    SiblingRef,
)
from tests.swarm_server.journal.lives import Life

CLIENT = "client"


@pytest.fixture
async def life(tmp_path: Path) -> AsyncIterator[Life]:
    found = Life(tmp_path / "run")
    await found.boot_trainer()
    yield found
    found.close()


async def train(life: Life, *names: str) -> None:
    for name in names:
        for index in range(2):
            await life.intake.add_call(SiblingRef(name, index), call())
        end = EndGroupRequest(group_id=name, rewards=[1.0, 0.0])
        assert (await life.intake.end_group(end, None)).pooled
        assert await life.step()


async def play(life: Life, reward: float, kind: str = "eval") -> EndEpisodeRequest:
    claimed = await life.intake.claim(CLIENT, kind, 60.0)
    end = EndEpisodeRequest(client_uuid=CLIENT, episode_uuid=claimed.uuid, task_id="t")
    await life.intake.end_episode(end, reward, None)
    return end


def told(life: Life) -> list[LogEntry]:
    assert life.journal.drain()
    return [entry for entry in life.log.entries_after(0) if entry.kind == "evaluated"]


def facts(life: Life) -> list[tuple[int, int, float]]:
    return [(one.step, one.version, one.metrics["reward"]) for one in told(life)]


async def test_an_evaluation_is_told_at_the_step_whose_weights_were_served(life: Life) -> None:
    await play(life, 0.0)
    await train(life, "a", "b")
    await play(life, 0.25)
    await play(life, 1.0, kind="train")
    assert facts(life) == [(0, 0, 0.0), (2, 2, 0.25)]
    assert [one.at for one in told(life)] == sorted(one.at or 0.0 for one in told(life))


async def test_an_end_that_is_sent_again_is_told_once(life: Life) -> None:
    end = await play(life, 0.5)
    await life.intake.end_episode(end, 0.5, None)
    assert facts(life) == [(0, 0, 0.5)]


async def test_a_killed_server_tells_the_same_and_goes_on_behind_it(
    life: Life, tmp_path: Path
) -> None:
    await train(life, "a", "b")  # saved at 2
    await play(life, 0.5)
    before = told(life)
    again = life.killed(tmp_path / "killed")
    assert told(again) == before
    end = await play(again, 0.75)  # before its engine is up: those weights were the last
    assert facts(again) == [(2, 2, 0.5), (2, 2, 0.75)]
    await again.boot_trainer()
    await play(again, 1.0)
    await again.intake.end_episode(end, 0.75, None)
    assert facts(again)[2:] == [(2, 3, 1.0)]
    assert [one.seq for one in again.log.entries_after(0)] == sorted(
        {o.seq for o in again.log.entries_after(0)}
    )
    again.close()


async def test_steps_to_be_trained_again_count_while_they_are_served(life: Life) -> None:
    await train(life, "a", "b", "c")  # saved at 2
    await life.log.record_rollback(2, 4)
    await play(life, 0.5)
    assert facts(life) == [(3, 3, 0.5)]
    again = life.next()
    await play(again, 0.25)
    await again.boot_trainer()
    await play(again, 0.75)
    assert facts(again) == [(3, 3, 0.5), (3, 3, 0.25), (2, 5, 0.75)]
    again.close()


async def test_weights_that_were_given_up_are_told_of_no_more(life: Life) -> None:
    await train(life, "a", "b", "c")
    life.log.record_abandoned(2, 4, "gone_back")
    await play(life, 0.5)  # step 3's are served still
    assert facts(life) == []
    again = life.next()
    await play(again, 0.5)
    assert facts(again) == []
    await again.boot_trainer()
    await play(again, 0.75)
    assert facts(again) == [(2, 5, 0.75)]
    again.close()
