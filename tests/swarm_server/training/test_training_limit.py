"""Training waits at its limit, while everything else goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest
from crash.lineage_backend import LineageBackend
from swarm_server.loops import JOB, Run
from swarm_server.samples import call

from fakevllm_adapters.protocol.releases import Decision
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.training import loop, stop_and_restart


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_and_restart, "FIRST_S", 0.0)
    monkeypatch.setattr(loop, "SWEEP_EVERY_S", 0.01)


def start(folder: Path, save_freq: int = 1) -> Run[LineageBackend]:
    job = JOB.model_copy(update={"save_freq": save_freq, "max_staleness": 1000})
    return Run(folder, LineageBackend(), job)


async def pool(run: Run[LineageBackend], name: str) -> None:
    """Finish a group that was sampled by the served version."""
    await run.rolling()
    version = run.engine.version
    await run.capture(name, *[call(version, ids=(ord(letter), 6)) for letter in "yn"])
    assert (await run.end_group(name, 1.0, 0.0)).pooled


async def train(run: Run[LineageBackend], *names: str) -> None:
    for name in names:
        await pool(run, name)
        await run.trained(name)


async def waits(run: Run[LineageBackend]) -> bool:
    """Let the loop check several times whether it may step. Return whether it made no step."""
    before = run.log.last_step
    for _ in range(20):
        run.loop.notify()
        await asyncio.sleep(0)
    return run.engine.status is EngineStatus.ROLLING and run.log.last_step == before


async def crash(run: Run[LineageBackend]) -> None:
    run.task.cancel()
    await asyncio.gather(run.task, return_exceptions=True)
    run.journal.close()


async def test_training_waits_at_the_limit_and_goes_on_when_it_is_raised_or_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fakevllm.server")
    run = start(tmp_path)
    await run.limit_training(2)
    await train(run, "a", "b")
    await pool(run, "c")
    assert await waits(run) and run.engine.version == 2
    lines = [line for line in caplog.messages if line.startswith("training waits at version 2")]
    assert len(lines) == 1, "the begin of the pause is logged once"
    await run.limit_training(3)
    await run.trained("c")
    await pool(run, "d")
    assert await waits(run) and run.engine.version == 3
    await run.limit_training(None)
    await run.trained("d")
    await run.stop()


async def test_a_limit_that_is_set_while_episodes_end_keeps_the_step_from_beginning(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    await run.rolling()
    run.episodes.claim("me", "train", 1000.0, now=time.monotonic())
    await pool(run, "a")
    await run.until(lambda: run.engine.status is EngineStatus.ROLLING_POST)
    await run.limit_training(0)
    await run.rolling()
    assert await waits(run) and run.log.last_step == 0
    await run.stop()


async def test_decisions_and_a_rollback_are_carried_out_while_training_waits(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    await run.limit_training(3)
    await train(run, "a", "b", "c")
    await pool(run, "d")
    assert (await run.decide(Decision.CANDIDATE)).success
    assert (await run.decide(Decision.RELEASED, 2)).success
    assert (await run.decide(Decision.REJECTED, 3)).success
    await run.rolling()
    assert [step for step, _ in run.backend.lineage] == [1, 2] and run.engine.version == 4
    assert (await run.roll_back(1)).success
    await run.rolling()
    assert [step for step, _ in run.backend.lineage] == [1] and run.engine.version == 5
    await pool(run, "e")
    assert await waits(run), "a return gives no leave for another step"
    await run.limit_training(6)
    await run.trained("e")
    assert run.releases.reply().training_limit == 6
    await run.stop()


async def test_the_limit_holds_after_a_restart(tmp_path: Path) -> None:
    run = start(tmp_path)
    await run.limit_training(2)
    await train(run, "a", "b")
    await run.stop()
    run = start(tmp_path)
    assert run.releases.training_limit == 2
    await pool(run, "c")
    assert await waits(run) and run.engine.version == 3
    assert run.releases.reply().released_copies == [0]
    await run.decide(Decision.RELEASED, 2)
    assert run.releases.reply().released_copies == [2, 3]
    await run.limit_training(None)
    await run.trained("c")
    await run.stop()
    run = start(tmp_path)
    assert run.releases.training_limit is None
    await run.stop()


async def test_undone_steps_are_trained_again_although_the_limit_is_reached(
    tmp_path: Path,
) -> None:
    run = start(tmp_path, save_freq=2)
    await run.limit_training(3)
    await train(run, "a", "b", "c")
    await pool(run, "d")
    await crash(run)
    run = start(tmp_path, save_freq=2)
    await run.until(lambda: run.engine.version == 5)  # version 4 is a copy of version 2
    await run.rolling()
    assert [step for step, _ in run.backend.lineage] == [1, 2, 3]
    assert await waits(run) and "d" not in run.trained_groups
    await run.decide(Decision.RELEASED, 2)
    assert run.releases.reply().released_copies == [2, 4]
    await run.limit_training(6)
    await run.trained("d")
    await run.stop()


async def test_a_release_and_a_return_let_limited_training_wait(tmp_path: Path) -> None:
    run = start(tmp_path)
    await run.limit_training(9)
    await train(run, "a", "b")
    assert (await run.decide(Decision.RELEASED, 2)).success
    assert run.releases.training_limit == 2
    await pool(run, "c")
    assert await waits(run)
    await run.limit_training(9)
    await run.trained("c")
    assert (await run.roll_back(2)).success
    await run.rolling()
    await pool(run, "d")
    assert await waits(run) and run.releases.reply().newest_copies == [2, 4]
    await run.stop()
    run = start(tmp_path)
    assert run.releases.training_limit == 3
    await run.stop()


async def test_without_a_limit_training_goes_on_after_a_release(tmp_path: Path) -> None:
    run = start(tmp_path)
    await train(run, "a")
    assert (await run.decide(Decision.RELEASED, 1)).success
    await train(run, "b")
    assert run.releases.training_limit is None
    await run.stop()
