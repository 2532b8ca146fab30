"""Weights that are loaded once more, as the next version, are known to the history of releases."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm_server.loops import JOB
from swarm_server.samples import call
from swarm_server.training.test_weight_probe import ProbedRun

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.releases import Decision
from fakevllm_server.episodes.group_filter import REJECTED_VERSION
from fakevllm_server.journal import reads
from fakevllm_server.training import loop, stop_and_restart

CANDIDATE, REJECTED = Decision.CANDIDATE, Decision.REJECTED


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_and_restart, "FIRST_S", 0.0)
    monkeypatch.setattr(loop, "SWEEP_EVERY_S", 0.01)
    monkeypatch.setattr(loop, "STEP_GRACE_S", 0.01)


async def reloaded(folder: Path, job: TrainJob = JOB) -> ProbedRun:
    """Return a run whose third step was published as version 3, and loaded again as version 4."""
    run = ProbedRun(folder, job)
    await run.train("a")
    await run.train("b")
    run.rollout.is_stale.extend([True, False])
    await run.train("c")
    assert run.engine.version == 4
    return run


async def test_the_version_of_a_second_load_continues_the_lineage(tmp_path: Path) -> None:
    run = await reloaded(tmp_path)
    assert run.releases.lineage().path == [0, 1, 2, 3, 4]
    assert run.releases.lineage().step_of(4) == run.log.last_step == 3
    await run.stop()


async def test_a_rejection_includes_the_version_of_the_second_load(tmp_path: Path) -> None:
    run = await reloaded(tmp_path)
    await run.capture("late", call(4), call(4))
    assert (await run.decide(REJECTED, 3)).success
    await run.rolling()
    assert run.releases.state.rejected >= {3, 4}
    assert (await run.end_group("late", 1.0, 0.0)).failure_reason == REJECTED_VERSION
    await run.stop()


async def test_the_version_of_a_second_load_can_become_the_candidate(tmp_path: Path) -> None:
    run = await reloaded(tmp_path, JOB.model_copy(update={"save_freq": 100}))
    reply = await run.decide(CANDIDATE)
    assert reply.record is not None and reply.record.version == 4
    assert [saved.version for saved in run.journal.read(reads.checkpoints)] == [4]
    await run.stop()


async def test_a_version_is_recorded_before_it_is_loaded(tmp_path: Path) -> None:
    run = ProbedRun(tmp_path)
    await run.train("a")
    run.rollout.is_stale.extend([True, True])
    versions: list[int] = []
    load = run.rollout.load_weights

    async def observe(folder: Path, version: int) -> None:
        await load(folder, version)
        await run.journal.flush()
        versions.append(run.journal.read(reads.log_position).version - version)

    run.rollout.load_weights = observe
    await run.finish_group("b")
    await run.until(lambda: run.rollout.num_launched == 2)
    await run.trained("b")
    assert run.rollout.loaded == [0, 1, 2, 3, 4]
    assert versions == [0, 0, 0], "each version was recorded when the engine had loaded it"
    await run.stop()
    again = ProbedRun(tmp_path)
    await again.rolling()
    assert again.engine.version == 5
    await again.stop()
