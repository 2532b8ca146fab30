"""Training steps beside episodes: what the training loop does with `async_steps`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from swarm_server.local_backend import LocalBackend
from swarm_server.loops import JOB, Parts, Run
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.releases import Decision
from fakevllm_adapters.protocol.swarm import EngineStatus, SiblingRef
from fakevllm_server.training import loop, stop_and_restart
from fakevllm_server.training import step as steps
from fakevllm_server.types.backend import BackendError
from fakevllm_server.types.calls import RecordedCall, VersionSpan

ROLLING, WEIGHT_SYNCING = EngineStatus.ROLLING, EngineStatus.WEIGHT_SYNCING


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_and_restart, "FIRST_S", 0.0)
    monkeypatch.setattr(steps, "RETRY_STEP_AFTER_S", 0.0)
    monkeypatch.setattr(loop, "SWEEP_EVERY_S", 0.01)


def job_with(async_steps: int) -> TrainJob:
    return JOB.model_copy(update={"async_steps": async_steps})


async def run_in_step(folder: Path, async_steps: int) -> Run[LocalBackend]:
    """Return a run whose trainer is in the middle of the first step, with the group "a"."""
    run = Run(folder, LocalBackend(), job_with(async_steps))
    run.backend.may_step.clear()
    await run.finish_group("a")
    await run.backend.step_begun.wait()
    return run


async def ended(run: Run[LocalBackend], name: str) -> None:
    """Wait until the group is trained, and its step has ended."""
    await run.until(lambda: name in run.trained_groups and not run.engine.async_step_runs)


@pytest.mark.parametrize(("async_steps", "status"), [(0, WEIGHT_SYNCING), (1, ROLLING)])
async def test_the_status_stays_rolling_during_a_step_only_with_async_steps(
    tmp_path: Path, async_steps: int, status: EngineStatus
) -> None:
    run = await run_in_step(tmp_path, async_steps)
    assert (run.engine.status, run.engine.async_step_runs) == (status, async_steps > 0)
    assert run.engine.collecting_step == 2
    run.backend.may_step.set()
    await ended(run, "a")
    await run.rolling()
    assert not run.engine.async_step_runs
    await run.stop()


async def test_groups_that_end_during_a_step_are_trained_by_the_next_steps_in_order(
    tmp_path: Path,
) -> None:
    run = await run_in_step(tmp_path, 2)
    for name in "bc":
        await run.pool_group(name)
    run.backend.may_step.set()
    await ended(run, "c")
    assert (run.trained_groups, run.dropped_groups) == ({"a": 1, "b": 2, "c": 3}, {})
    ages = [entry.metrics["staleness_max"] for entry in run.log.entries_after(0)]
    assert ages == [0.0, 1.0, 2.0]
    await run.stop()


async def test_a_group_of_older_weights_than_the_job_allows_is_dropped_and_counted(
    tmp_path: Path,
) -> None:
    job = job_with(1).model_copy(update={"max_staleness": 1})
    run = Run(tmp_path, LocalBackend(), job)
    for name in "ab":
        await run.finish_group(name)
        await ended(run, name)
    await run.pool_group("late")
    await run.until(lambda: "late" in run.dropped_groups)
    await run.capture("c", call(2), call(2))
    await run.end_group("c", 1.0, 0.0)
    await ended(run, "c")
    assert (run.trained_groups, run.dropped_groups) == ({"a": 1, "b": 2, "c": 3}, {"late": "stale"})
    metrics = list(run.log.entries_after(0))[-1].metrics
    assert (metrics["stale_calls"], metrics["dropped_stale"]) == (2.0, 1.0)
    await run.stop()


@pytest.mark.parametrize("async_steps", [0, 1])
async def test_a_call_of_two_versions_is_not_trained_only_with_async_steps(
    tmp_path: Path, async_steps: int
) -> None:
    run = Run(tmp_path, LocalBackend(), job_with(async_steps))
    await run.rolling()
    spans = [VersionSpan(0, 0, 1), VersionSpan(1, 1, 2)]
    mixed = RecordedCall([1], [5, 6], [-0.5, -0.5], spans, 1.0, "stop", None)
    await run.intake.add_call(SiblingRef("a", 0), mixed)
    await run.intake.add_call(SiblingRef("a", 1), call())
    reply = await run.end_group("a", 1.0, 0.0)
    reasons = [each.untrainable for (each,) in reply.with_prompts_per_call().calls]
    assert [reason and reason.split(":")[0] for reason in reasons] == [
        "several_versions" if async_steps else None,
        None,
    ]
    await run.stop()


async def test_a_stop_lets_the_running_step_end_and_the_next_process_trains_it_not_again(
    tmp_path: Path,
) -> None:
    run = await run_in_step(tmp_path, 1)
    await run.pool_group("b")
    stopping = asyncio.create_task(run.loop.stop(run.task))
    await asyncio.sleep(0)
    assert not stopping.done()
    run.backend.may_step.set()
    await stopping
    assert (run.trained_groups, run.saved_steps) == ({"a": 1}, [1])
    run.journal.close()
    again = Run(tmp_path, LocalBackend(), job_with(1))
    await ended(again, "b")
    assert (again.trained_groups, again.backend.steps) == ({"a": 1, "b": 2}, [2])
    await again.stop()


async def test_a_step_that_outlasts_the_grace_of_a_stop_is_trained_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "STEP_GRACE_S", 0.0)
    run = await run_in_step(tmp_path, 1)
    await run.stop()
    assert not run.engine.async_step_runs
    again = Run(tmp_path, LocalBackend(), job_with(1))
    await ended(again, "a")
    assert (again.trained_groups, again.dropped_groups) == ({"a": 1}, {})
    await again.stop()


async def test_a_trainer_that_dies_in_a_step_trains_the_same_groups_after_its_restart(
    tmp_path: Path,
) -> None:
    run = await run_in_step(tmp_path, 2)
    await run.pool_group("b")
    run.backend.plan("step", BackendError("connection lost"))
    run.backend.may_step.set()
    await ended(run, "b")
    assert run.backend.num_launched == 2
    assert (run.trained_groups, run.dropped_groups) == ({"a": 1, "b": 2}, {})
    await run.stop()


async def test_a_rollout_engine_that_dies_in_a_step_gets_the_newest_weights_after_its_restart(
    tmp_path: Path,
) -> None:
    parts = Parts(tmp_path, job_with(1))
    run = parts.run
    parts.trainer.may_step.clear()
    await run.finish_group("a")
    await parts.trainer.step_begun.wait()
    parts.rollout.die("the engine exited with code 9")
    await asyncio.sleep(0)
    assert run.engine.async_step_runs, "the step goes on"
    parts.trainer.may_step.set()
    await run.until(lambda: parts.rollout.loaded == [0, 1])
    await run.rolling()
    await run.finish_group("b")
    await run.trained("b")
    assert (parts.rollout.num_launched, parts.trainer.num_launched) == (2, 1)
    assert (parts.trainer.steps, run.dropped_groups) == ([1, 2], {})
    await run.stop()


async def test_a_decision_about_a_version_waits_for_the_step_and_holds_the_next_one(
    tmp_path: Path,
) -> None:
    run = await run_in_step(tmp_path, 2)
    await run.pool_group("b")
    deciding = asyncio.create_task(run.decide(Decision.CANDIDATE))
    limiting = asyncio.create_task(run.limit_training(1))
    await limiting
    assert not deciding.done()
    run.backend.may_step.set()
    record = (await deciding).record
    assert record is not None and record.version == 1
    assert (run.trained_groups, run.pool.num_finished) == ({"a": 1}, 1)
    await run.limit_training(None)
    await ended(run, "b")
    await run.stop()


async def test_training_goes_back_between_two_steps_and_drops_the_groups_of_the_rejected_version(
    tmp_path: Path,
) -> None:
    run = await run_in_step(tmp_path, 2)
    run.backend.may_step.set()
    await ended(run, "a")
    await run.decide(Decision.CANDIDATE)
    await run.decide(Decision.RELEASED, 1)
    run.backend.step_begun.clear()
    run.backend.may_step.clear()
    await run.pool_group("b")
    await run.backend.step_begun.wait()
    going_back = asyncio.create_task(run.roll_back(1))
    await asyncio.sleep(0)
    assert run.engine.async_step_runs and not going_back.done()
    run.backend.may_step.set()
    assert (await going_back).success
    assert run.trained_groups == {"a": 1} and run.engine.status is ROLLING
    await run.capture("c", call(run.engine.version), call(run.engine.version))
    await run.end_group("c", 1.0, 0.0)
    await ended(run, "c")
    await run.stop()
