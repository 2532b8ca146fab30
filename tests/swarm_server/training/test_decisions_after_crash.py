"""Decisions about versions that a crash has undone, or that a restart serves again."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from crash.lineage_backend import LineageBackend
from swarm_server.loops import JOB, Run
from swarm_server.samples import call

from fakevllm_adapters.protocol.releases import Decision
from fakevllm_server.episodes.group_filter import REJECTED_VERSION
from fakevllm_server.journal import reads
from fakevllm_server.training import loop, stop_and_restart

CANDIDATE, RELEASED, REJECTED, UNDECIDED, HOLD, RESUME = Decision


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_and_restart, "FIRST_S", 0.0)
    monkeypatch.setattr(loop, "SWEEP_EVERY_S", 0.01)


def start(folder: Path, save_freq: int = 1) -> Run[LineageBackend]:
    job = JOB.model_copy(update={"save_freq": save_freq, "max_staleness": 1000})
    return Run(folder, LineageBackend(), job)


async def capture(run: Run[LineageBackend], name: str) -> None:
    version = run.engine.version
    siblings = [call(version, ids=(ord(letter), 6)) for letter in "yn"]
    await run.capture(name, *siblings)


async def train(run: Run[LineageBackend], *names: str) -> None:
    for name in names:
        await run.rolling()
        await capture(run, name)
        assert (await run.end_group(name, 1.0, 0.0)).pooled
        await run.trained(name)


async def crash(run: Run[LineageBackend]) -> None:
    run.task.cancel()
    await asyncio.gather(run.task, return_exceptions=True)
    run.journal.close()


async def test_a_version_that_waits_to_be_trained_again_can_be_rejected(tmp_path: Path) -> None:
    run = start(tmp_path, save_freq=2)
    await train(run, "a", "b", "c")
    await run.decide(RELEASED, 2)
    await crash(run)
    run = start(tmp_path, save_freq=2)
    assert (await run.decide(REJECTED, 3)).success
    await run.until(lambda: not run.loop.has_planned and run.engine.version == run.log.version)
    await run.rolling()
    assert [step for step, _ in run.backend.lineage] == [1, 2], "the weights of step 3 are gone"
    assert run.releases.state.rejected >= {3} and 3 not in run.trained_groups.values()
    assert run.dropped_groups == {"c": REJECTED_VERSION}
    assert run.engine.version not in run.releases.state.rejected
    await train(run, "d")
    await run.stop()


async def test_a_version_is_rejected_although_its_step_is_not_trained_again(tmp_path: Path) -> None:
    run = start(tmp_path, save_freq=2)
    await train(run, "a", "b", "c")
    await run.decide(RELEASED, 2)
    await crash(run)
    run = start(tmp_path, save_freq=2)
    # Training has stopped, so the undone step stays planned.
    run.loop._steps._mismatch_stop.reason = "the mismatch is too large"  # pyright: ignore[reportPrivateUsage]
    assert (await run.decide(REJECTED, 3)).success
    assert not run.loop.has_planned and run.dropped_groups == {"c": REJECTED_VERSION}
    await run.stop()


async def test_after_a_return_to_a_kept_checkpoint_no_step_follows_an_older_one(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    await train(run, "a", "b", "c")
    await run.decide(RELEASED, 1)
    await run.decide(CANDIDATE, 3)
    await run.decide(REJECTED, 3)
    await train(run, "x")
    await run.decide(RELEASED, 3, force=True)
    assert (await run.roll_back(3)).success
    await run.rolling()
    assert [step for step, _ in run.backend.lineage] == [1, 2, 3]
    await run.stop()
    run = start(tmp_path, save_freq=100)
    await train(run, "y")
    newest = run.journal.read(reads.checkpoints)[0]
    assert newest.step == 3
    await crash(run)
    shutil.rmtree(tmp_path / "checkpoints" / newest.folder)
    run = start(tmp_path, save_freq=100)
    await run.rolling()
    # Step 4 was trained from step 3, whose weights are lost, so it is lost with them.
    assert [step for step, _ in run.backend.lineage] == [1]
    assert run.log.last_step == 1 and not run.loop.has_planned
    assert run.dropped_groups["y"] == "lost_with_checkpoint"
    await train(run, "z")
    await run.stop()


async def test_a_rejection_of_restored_weights_rejects_the_version_that_was_trained(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    await train(run, "a", "b", "c")
    await run.decide(RELEASED, 1)
    await run.decide(CANDIDATE, 3)
    await run.stop()
    run = start(tmp_path)
    await run.rolling()
    assert run.engine.version == 4
    assert (await run.decide(REJECTED, 4)).success
    await run.rolling()
    assert run.releases.state.rejected == {3, 4} and run.releases.state.candidate is None
    assert [step for step, _ in run.backend.lineage] == [1]
    reply = await run.decide(RELEASED, 3)
    assert not reply.success and "was rejected" in reply.failure_reason
    await run.stop()


async def test_restored_weights_of_the_released_version_are_neither_rejected_nor_restored_again(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    await train(run, "a", "b")
    await run.decide(RELEASED, 2)
    await run.stop()
    run = start(tmp_path)
    await run.rolling()
    assert run.engine.version == 3
    await capture(run, "waits")
    for reply in (await run.roll_back(None), await run.decide(REJECTED, 3)):
        assert not reply.success and "nothing to go back from" in reply.failure_reason
    assert (await run.end_group("waits", 1.0, 0.0)).pooled
    assert run.engine.version == 3 and run.releases.state.rejected == set()
    await run.stop()


async def test_a_second_rollback_changes_nothing(tmp_path: Path) -> None:
    run = start(tmp_path)
    await train(run, "a", "b")
    await run.decide(RELEASED, 2)
    await train(run, "c")
    assert (await run.roll_back(None, "first")).success
    await run.rolling()
    await capture(run, "waits")
    reply = await run.roll_back(None, "second")
    assert not reply.success and "nothing to go back from" in reply.failure_reason
    assert (await run.end_group("waits", 1.0, 0.0)).pooled
    assert run.releases.state.rejected == {3}
    await run.stop()


async def test_training_can_go_back_to_a_restored_version_of_the_model(tmp_path: Path) -> None:
    run = start(tmp_path)
    await train(run, "a")
    assert (await run.roll_back(0, "first")).success
    await run.until(lambda: run.engine.version == 3)  # version 2 became 3 with the restart
    await train(run, "b")
    assert (await run.roll_back(2, "second")).success
    await run.until(lambda: run.engine.version == 6)
    await run.rolling()
    assert run.backend.lineage == [] and run.releases.state.rejected == {1, 4}
    await run.stop()
