"""Evaluations in the run log: one entry each, at the step whose weights were served."""

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
from tests.swarm_server.journal.server_process import ServerProcess

CLIENT = "client"


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    opened = ServerProcess(tmp_path / "run")
    await opened.boot_trainer()
    yield opened
    opened.close()


async def train(process: ServerProcess, *names: str) -> None:
    for name in names:
        for index in range(2):
            await process.intake.add_call(SiblingRef(name, index), call())
        end = EndGroupRequest(group_id=name, rewards=[1.0, 0.0])
        assert (await process.intake.end_group(end, None)).pooled
        assert await process.step()


async def play(process: ServerProcess, reward: float, kind: str = "eval") -> EndEpisodeRequest:
    claimed = await process.intake.claim(CLIENT, kind, 60.0)
    end = EndEpisodeRequest(client_uuid=CLIENT, episode_uuid=claimed.uuid, task_id="t")
    await process.intake.end_episode(end, reward, None)
    return end


def evaluation_entries(process: ServerProcess) -> list[LogEntry]:
    assert process.journal.drain()
    return [entry for entry in process.log.entries_after(0) if entry.kind == "evaluated"]


def evaluations(process: ServerProcess) -> list[tuple[int, int, float]]:
    return [(one.step, one.version, one.metrics["reward"]) for one in evaluation_entries(process)]


async def test_an_evaluation_is_logged_at_the_step_whose_weights_were_served(
    process: ServerProcess,
) -> None:
    await play(process, 0.0)
    await train(process, "a", "b")
    await play(process, 0.25)
    await play(process, 1.0, kind="train")
    assert evaluations(process) == [(0, 0, 0.0), (2, 2, 0.25)]
    assert [one.at for one in evaluation_entries(process)] == sorted(
        one.at or 0.0 for one in evaluation_entries(process)
    )


async def test_a_repeated_end_is_logged_once(process: ServerProcess) -> None:
    end = await play(process, 0.5)
    await process.intake.end_episode(end, 0.5, None)
    assert evaluations(process) == [(0, 0, 0.5)]


async def test_the_log_is_the_same_after_a_kill_and_continues(
    process: ServerProcess, tmp_path: Path
) -> None:
    await train(process, "a", "b")  # saved at 2
    await play(process, 0.5)
    before = evaluation_entries(process)
    again = process.restarted_after_kill(tmp_path / "killed")
    assert evaluation_entries(again) == before
    end = await play(again, 0.75)  # before its engine is up: those weights were the last
    assert evaluations(again) == [(2, 2, 0.5), (2, 2, 0.75)]
    await again.boot_trainer()
    await play(again, 1.0)
    await again.intake.end_episode(end, 0.75, None)
    assert evaluations(again)[2:] == [(2, 3, 1.0)]
    assert [one.seq for one in again.log.entries_after(0)] == sorted(
        {o.seq for o in again.log.entries_after(0)}
    )
    again.close()


async def test_steps_to_be_trained_again_count_while_they_are_served(
    process: ServerProcess,
) -> None:
    await train(process, "a", "b", "c")  # saved at 2
    await process.log.record_rollback(2, 4)
    await play(process, 0.5)
    assert evaluations(process) == [(3, 3, 0.5)]
    again = process.restarted()
    await play(again, 0.25)
    await again.boot_trainer()
    await play(again, 0.75)
    assert evaluations(again) == [(3, 3, 0.5), (3, 3, 0.25), (2, 5, 0.75)]
    again.close()


async def test_evaluations_of_abandoned_weights_are_not_logged(process: ServerProcess) -> None:
    await train(process, "a", "b", "c")
    process.log.record_abandoned(2, 4, "gone_back")
    await play(process, 0.5)  # step 3's are served still
    assert evaluations(process) == []
    again = process.restarted()
    await play(again, 0.5)
    assert evaluations(again) == []
    await again.boot_trainer()
    await play(again, 0.75)
    assert evaluations(again) == [(2, 5, 0.75)]
    again.close()
