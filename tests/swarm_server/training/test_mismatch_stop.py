"""Training stops when trainer and engine disagree too much, and serving continues."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from swarm_server.local_backend import LocalBackend
from swarm_server.loops import JOB, Run
from swarm_server.samples import call

from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply, LogEntry
from fakevllm_server.backends.training.mismatch_limit import NO_UPDATE, TOO_FAR, is_too_far
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.log import RunLog
from fakevllm_server.training import loop, stop_and_restart
from fakevllm_server.training.stop_and_restart import MAX_TOO_FAR, MismatchStop
from fakevllm_server.types.backend import Batch, LossSpec, StepMetrics
from fakevllm_server.web.routes.control import router
from fakevllm_server.web.server_state import ServerState


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_and_restart, "FIRST_S", 0.0)
    monkeypatch.setattr(loop, "SWEEP_EVERY_S", 0.01)


class DriftingBackend(LocalBackend):
    """A backend with given mismatches, which makes no update above the limit, as trainers do."""

    def __init__(self, *mismatches: float) -> None:
        super().__init__()
        self.mismatches = list(mismatches)
        self.versions: list[int | None] = []

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        self.versions.append(batch.version)
        measured: StepMetrics = {"mismatch_k3": self.mismatches.pop(0), "ess": 0.5}
        if measured["mismatch_k3"] < 0:
            return {**measured, "loss": math.nan, "grad_norm": math.inf, **NO_UPDATE}
        if is_too_far(measured, JOB):
            self.steps.append(batch.step)
            return {**measured, **TOO_FAR}
        return await super().step(batch, loss) | measured


def entries(run: Run[DriftingBackend], kind: str) -> list[LogEntry]:
    return [entry for entry in run.log.entries_after(0) if entry.kind == kind]


async def test_three_consecutive_steps_above_the_limit_stop_training_but_not_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fakevllm.server")
    run = Run(tmp_path, DriftingBackend(0.01, 5.0, 5.0, 6.0))
    for name in "abcd":
        await run.finish_group(name)
        await run.trained(name)
    (stop,) = entries(run, "stopped")

    assert run.loop.closed_reason is not None
    assert run.engine.status is EngineStatus.ROLLING and run.engine.is_serving
    assert run.engine.detail == stop.reason
    assert "training stopped at step 4" in stop.reason and "mismatch_k3 6" in stop.reason
    assert stop.reason in caplog.text
    assert caplog.text.count("made no update") == 3
    assert run.backend.steps == [1, 2, 3, 4]
    await run.stop()
    journal = Journal(tmp_path / "journal.sqlite")
    again = RunLog(journal).entries_after(0)
    assert [entry.reason for entry in again if entry.kind == "stopped"] == [stop.reason]
    journal.close()


async def test_waiting_groups_are_dropped_when_training_stops(tmp_path: Path) -> None:
    run = Run(tmp_path, DriftingBackend(5.0, 5.0, 5.0))
    await run.rolling()
    run.backend.may_step.clear()
    for name in "abcd":
        await run.pool_group(name)
    run.backend.may_step.set()
    await run.until(lambda: len(run.dropped_groups) == 1)

    assert set(run.dropped_groups.values()) == {"training_stopped"}
    assert len(run.trained_groups) == 3
    await run.stop()


async def test_training_stays_stopped_when_the_engine_is_restarted(tmp_path: Path) -> None:
    run = Run(tmp_path, DriftingBackend(5.0, 5.0, 5.0))
    for name in "abc":
        await run.finish_group(name)
        await run.trained(name)
    reason = run.engine.detail
    run.backend.dead.set_result("killed")
    await run.until(lambda: run.backend.num_launched == 2)
    await run.rolling()

    assert reason is not None and run.engine.detail == reason
    assert run.loop.closed_reason is not None
    await run.stop()


async def test_a_step_that_is_not_finite_trains_nothing_and_logs_the_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, DriftingBackend(-1.0))
    await run.finish_group("a")
    await run.trained("a")
    (entry,) = entries(run, "step")
    assert entry.groups[0].siblings == [] and entry.metrics["untrained_tokens_not_finite"] == 4
    assert math.isnan(entry.metrics["loss"]) and entry.metrics["grad_norm"] == math.inf
    assert "step 1 made no update: loss nan, grad_norm inf" in caplog.text
    await run.stop()


async def test_a_step_without_an_update_trained_no_sibling_and_no_token(tmp_path: Path) -> None:
    run = Run(tmp_path, DriftingBackend(5.0, 0.01))
    for name in "ab":
        await run.finish_group(name)
        await run.trained(name)
    far, near = entries(run, "step")

    assert [one.siblings for one in far.groups + near.groups] == [[], [0, 1]]
    assert far.metrics["too_far"] == 1 and "too_far" not in near.metrics
    assert (far.metrics["tokens_trained"], far.metrics["sample_coverage"]) == (0, 0)
    assert far.metrics["untrained_tokens_too_far"] == near.metrics["tokens_trained"] == 4
    assert run.loop.closed_reason is None and run.engine.detail is None
    await run.stop()


async def test_every_step_reports_coverage_and_branches_and_the_run_sums_them(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, DriftingBackend(0.01, 0.01))
    for name in "ab":
        await run.rolling()
        await run.capture(name, call(), call())
        await run.finish_group(name)
        await run.trained(name)
    for entry in entries(run, "step"):
        assert entry.metrics["sample_coverage"] == 1 and entry.metrics["branch_rate"] == 1
    assert run.log.totals["tokens_sampled"] == 16
    assert run.log.totals["branch_regenerated"] == 4
    await run.stop()


async def test_a_trainer_gets_the_version_that_its_weights_are_served_as(tmp_path: Path) -> None:
    run = Run(tmp_path, DriftingBackend(0.01, 0.01))
    for name in "ab":
        await run.finish_group(name)
        await run.trained(name)
    assert run.backend.versions == [0, 1] and run.engine.version == 2
    await run.stop()


async def test_the_engine_status_contains_the_stop_reason_and_the_totals(tmp_path: Path) -> None:
    swarm = ServerState(ServerConfig("fake", tmp_path))
    metrics = {"tokens_eligible": 8.0, "tokens_trained": 4.0, "untrainable_tokens_x": 3.0}
    for step in (1, 2):
        await swarm.runlog.record_step(step, step, [], metrics)
    swarm.engine.detail = "training stopped at step 2"
    app = FastAPI()
    app.include_router(router(swarm))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as http:
        status = EngineStatusReply.model_validate((await http.get("/get_engine_status")).json())

    assert status.engine_status_detail == swarm.engine.detail
    assert status.totals["untrainable_tokens_x"] == 6 and status.totals["sample_coverage"] == 0.5
    await swarm.close()


def test_the_stop_reason_shows_a_mismatch_that_is_nan() -> None:
    limit = MismatchStop()
    for step in range(MAX_TOO_FAR):
        limit.observe(step, {"too_far": 1.0, "mismatch_k3": math.nan}, 1.0)
    assert limit.reason is not None and "mismatch_k3 nan" in limit.reason
    assert "run `fakevllm-server start` and `fakevllm serve` with" in limit.reason


def test_only_consecutive_steps_stop_a_run() -> None:
    limit = MismatchStop()
    far = {"too_far": 1.0, "mismatch_k3": 2.0}
    well = {"tokens_trained": 1.0}
    for step, metrics in enumerate([*[far] * (MAX_TOO_FAR - 1), well, *[far] * (MAX_TOO_FAR - 1)]):
        limit.observe(step, metrics, 1.0)
    assert limit.reason is None
    limit.observe(9, far, 1.0)
    assert limit.reason is not None and "step 9" in limit.reason


def test_a_step_of_feedback_samples_neither_counts_nor_resets_the_count() -> None:
    limit = MismatchStop()
    far = {"too_far": 1.0, "mismatch_k3": 2.0}
    for step in range(MAX_TOO_FAR - 1):
        limit.observe(step, far, 1.0)
    limit.observe(7, far | {"feedback_samples": 1.0}, 1.0)
    assert limit.reason is None
    limit.observe(8, {"tokens_trained": 1.0, "feedback_samples": 1.0}, 1.0)
    limit.observe(9, far, 1.0)
    assert limit.reason is not None


def test_steps_that_were_counted_before_a_rollback_no_longer_count() -> None:
    limit = MismatchStop()
    far = {"too_far": 1.0, "mismatch_k3": 2.0}
    for step in (7, 8):
        limit.observe(step, far, 1.0)
    limit.observe(6, {"skipped": 1.0}, 1.0)
    limit.observe(7, far, 1.0)
    assert MAX_TOO_FAR == 3 and limit.reason is None


def test_a_step_that_is_trained_again_counts_once() -> None:
    limit = MismatchStop()
    for step in (1, 2, 1, 2):
        limit.observe(step, {"too_far": 1.0, "mismatch_k3": 2.0}, 1.0)
    assert limit.reason is None
    limit.observe(3, {"too_far": 1.0, "mismatch_k3": 2.0}, 1.0)
    assert limit.reason is not None


@pytest.mark.parametrize(
    "unmeasured", [{"tokens_trained": 0.0}, {"tokens_trained": 1.0, "skipped": 1}]
)
def test_a_step_without_a_measurement_does_not_reset_the_count(
    unmeasured: dict[str, float],
) -> None:
    limit = MismatchStop()
    for step in range(MAX_TOO_FAR):
        limit.observe(2 * step, {"too_far": 1.0, "mismatch_k3": 2.0}, 1.0)
        limit.observe(2 * step + 1, unmeasured, 1.0)
    assert limit.reason is not None


def test_a_step_of_feedback_alone_neither_counts_nor_resets_the_count() -> None:
    """Feedback on old answers has a large mismatch because the answers are old."""
    limit = MismatchStop()
    far = {"too_far": 1.0, "mismatch_k3": 2.0}
    alone = {"feedback_samples": 2.0, "groups": 0.0}
    for step in range(9):
        limit.observe(step, alone | far, 1.0)
    assert limit.reason is None
    limit.observe(10, far, 1.0)
    limit.observe(11, {"feedback_samples": 2.0, "groups": 3.0} | far, 1.0)
    limit.observe(12, alone | {"tokens_trained": 4.0}, 1.0)
    assert limit.reason is None
    limit.observe(13, far, 1.0)
    assert limit.reason is not None


async def test_the_count_continues_after_a_kill(tmp_path: Path) -> None:
    """Two steps above the limit before a crash and one after it are three consecutive steps."""
    run = Run(tmp_path, DriftingBackend(0.01, 5.0, 6.0))
    for name in "abc":
        await run.finish_group(name)
        await run.trained(name)
    (tmp_path / "next").mkdir()
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "next/checkpoints")
    for file in tmp_path.glob("journal.sqlite*"):
        shutil.copy(file, tmp_path / "next")
    again = Run(tmp_path / "next", DriftingBackend(7.0))
    await again.finish_group("d")
    await again.trained("d")
    assert again.loop.closed_reason == "training_stopped"
    assert again.engine.detail is not None
    assert "training stopped at step 4" in again.engine.detail
    await run.stop()
    await again.stop()


async def test_a_stopped_run_trains_again_after_a_restart_of_the_server(tmp_path: Path) -> None:
    run = Run(tmp_path, DriftingBackend(5.0, 5.0, 5.0))
    for name in "abc":
        await run.finish_group(name)
        await run.trained(name)
    assert run.loop.closed_reason == "training_stopped"
    await run.stop()
    again = Run(tmp_path, DriftingBackend(5.0, 0.01), JOB.model_copy(update={"max_staleness": 9}))
    for name in "de":
        await again.finish_group(name)
        await again.trained(name)
    assert again.loop.closed_reason is None
    await again.stop()


async def test_a_server_killed_at_the_limit_records_the_stop_after_a_restart(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    log = RunLog(journal)
    far = {"too_far": 1.0, "mismatch_k3": 5.0, "groups": 1.0}
    for step in (1, 2, 3):
        await log.record_step(step, step, [], far)
    journal.close()
    run = Run(tmp_path, DriftingBackend())
    await run.until(lambda: bool(entries(run, "stopped")))
    assert run.loop.closed_reason == "training_stopped"
    assert "training stopped at step 3" in entries(run, "stopped")[0].reason
    await run.stop()


@pytest.mark.parametrize(
    ("mismatch_k3", "is_far"), [(0.5, False), (1.0, False), (1.01, True), (float("nan"), True)]
)
def test_a_mismatch_above_the_limit_or_nan_is_too_far(mismatch_k3: float, is_far: bool) -> None:
    assert is_too_far({"mismatch_k3": mismatch_k3}, JOB) is is_far
    assert not is_too_far(
        {"mismatch_k3": mismatch_k3}, JOB.model_copy(update={"max_mismatch_k3": None})
    )
