"""If a trainer refuses, the last available weights are served and nothing is trained."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from swarm_server.local_backend import LocalBackend
from swarm_server.loops import JOB, Parts, Run
from swarm_server.samples import call

from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.training import loop, stop_and_restart
from fakevllm_server.types.backend import ActionFailed, BackendError, BackendRefused

REASON = "target_modules names 'nope': name another"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_and_restart, "FIRST_S", 0.0)
    monkeypatch.setattr(loop, "SWEEP_EVERY_S", 0.01)
    monkeypatch.setattr(loop, "STEP_GRACE_S", 0.01)


def start(folder: Path) -> Run[LocalBackend]:
    return Run(folder, LocalBackend())


async def trained_once(folder: Path) -> None:
    """Train one group, then stop the run."""
    run = start(folder)
    await run.finish_group("a")
    await run.trained("a")
    await run.stop()


async def test_an_engine_serves_without_training_if_its_trainer_refuses_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start(tmp_path)
    run.backend.plan("boot", BackendRefused(REASON))
    await run.rolling()
    message = (
        f"training is off, serving goes on: {REASON}. Fix the cause, then stop the "
        "server and the proxy, and start both again"
    )
    assert run.engine.detail == message and message in caplog.messages
    assert (len(run.endpoints), run.backend.num_launched) == (1, 1)
    await run.capture("a", call(), call())
    reply = await run.end_group("a", 1.0, 0.0)
    assert (reply.pooled, reply.failure_reason) == (False, "training_refused")
    await run.stop()
    assert run.backend.steps == []


async def test_a_refused_job_is_served_with_the_last_weights_and_keeps_planned_steps(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    for name in "ab":
        await run.finish_group(name)
        await run.trained(name)
    run.backend.plan("save", *[OSError("disk full")] * 2)
    await run.finish_group("c")
    await run.trained("c")
    run.backend.may_step.clear()
    run.backend.step_begun.clear()
    await run.finish_group("d")
    await run.backend.step_begun.wait()
    await run.stop()

    refused = start(tmp_path)
    refused.backend.plan("boot", BackendRefused(REASON))
    await refused.rolling()
    assert refused.engine.global_step == 3
    assert refused.engine.version == refused.log.version
    (theta,) = (tmp_path / "checkpoints").rglob("step-*2/theta.json")
    assert orjson.loads(theta.read_bytes())["theta"] == refused.backend.served_theta
    await refused.stop()
    assert refused.backend.steps == []

    restarted = start(tmp_path)
    await restarted.trained("d")
    assert restarted.trained_groups == {"a": 1, "b": 2, "c": 3, "d": 4}
    assert (restarted.dropped_groups, restarted.backend.steps) == ({}, [3, 4])
    await restarted.stop()


async def test_a_run_whose_checkpoints_are_all_unreadable_does_not_start_from_scratch(
    tmp_path: Path,
) -> None:
    await trained_once(tmp_path)
    again = start(tmp_path)
    again.backend.plan("restore", ActionFailed("torn"))
    await again.rolling()
    assert "choose another --run-dir" in (again.engine.detail or "")
    await again.capture("b", call(), call())
    assert (await again.end_group("b", 1.0, 0.0)).failure_reason == "training_refused"
    await again.stop()
    assert again.backend.steps == []
    restarted = start(tmp_path)
    await restarted.finish_group("c")
    await restarted.trained("c")
    assert (restarted.backend.steps, restarted.trained_groups) == ([2], {"a": 1, "c": 2})
    await restarted.stop()


async def test_apps_are_served_if_the_trainer_cannot_be_started(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    run = parts.run
    parts.trainer.plan("launch", *[BackendRefused("verl needs ray: install it")] * 2)
    await run.rolling()
    await run.capture("a", call(), call())
    assert (await run.end_group("a", 1.0, 0.0)).failure_reason == "training_refused"
    assert "verl needs ray: install it" in (run.engine.detail or "")
    assert len(parts.trainer.failures["launch"]) == 1, "the refused start is not retried"
    parts.trainer.failures.clear()
    parts.rollout.die("gone")
    await run.until(lambda: parts.rollout.num_launched == 2)
    await run.finish_group("b")  # the cause was fixed
    await run.trained("b")
    assert (run.engine.detail, parts.trainer.num_launched) == (None, 1)
    await run.stop()


async def test_a_job_stays_refused_after_a_restart_of_the_rollout_engine(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    run = parts.run
    parts.trainer.plan("boot", *[BackendRefused(REASON)] * 2)
    await run.rolling()
    await run.capture("a", call(), call())
    parts.rollout.die("gone")
    await run.until(lambda: parts.rollout.num_launched == 2)
    await run.rolling()
    assert REASON in (run.engine.detail or "")
    assert (await run.end_group("a", 1.0, 0.0)).failure_reason == "training_refused"
    await run.stop()


async def test_the_reason_of_a_refused_job_is_kept_if_its_weights_are_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def publish(version: int) -> None:
        raise BackendRefused("the trainer has no adapters to publish")

    run = start(tmp_path)
    run.backend.plan("boot", BackendRefused(REASON))
    monkeypatch.setattr(run.backend, "publish", publish)
    await run.rolling()
    assert REASON in (run.engine.detail or "") and "no adapters" not in (run.engine.detail or "")
    assert "no adapters to publish" in caplog.text
    await run.stop()


async def test_the_last_weights_are_served_if_a_restarted_trainer_refuses(
    tmp_path: Path,
) -> None:
    parts = Parts(tmp_path)
    run = parts.run
    await run.finish_group("a")
    await run.trained("a")
    parts.trainer.plan("launch", BackendRefused("no GPU is left"))
    parts.trainer.die("gone")
    await run.until(lambda: "no GPU is left" in (run.engine.detail or ""))
    assert (run.engine.status, run.engine.version) == (EngineStatus.ROLLING, 1)
    assert (parts.rollout.num_launched, parts.rollout.loaded) == (1, [0, 1])
    assert len(run.endpoints) == 1, "running calls continue"
    await run.stop()


async def test_a_temporary_error_is_not_a_refusal(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.backend.plan("boot", BackendError("gone"))
    await run.finish_group("a")
    await run.trained("a")
    assert run.engine.detail is None
    await run.stop()


async def test_waiting_groups_of_a_finished_run_are_dropped_at_the_next_start(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    await run.finish_group("a")
    await run.trained("a")
    run.backend.may_launch.clear()
    run.backend.dead.set_result("gone")
    await run.until(lambda: run.engine.status is EngineStatus.BOOTING)
    await run.pool_group("b")
    await run.stop()
    over = Run(tmp_path, LocalBackend(), JOB.model_copy(update={"total_training_steps": 1}))
    await over.until(lambda: over.dropped_groups == {"b": "training_finished"})
    await over.stop()
