"""Forgetting groups of a run: what is dropped, what is saved first, and what a restart trains."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from swarm_server.local_backend import LocalBackend
from swarm_server.loops import JOB, Run
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.forgetting import ForgetGroupsReply, ForgetGroupsRequest
from fakevllm_server.journal.forgotten_calls import num_calls
from fakevllm_server.training import forget_service, loop, stop_and_restart
from fakevllm_server.training.forget_service import ForgetService
from fakevllm_server.training.release_service import Action, Result

RARELY_SAVED = JOB.model_copy(update={"save_freq": 100})
PAIRS = RARELY_SAVED.model_copy(update={"batch_size": 2})
RUN_ID = "run"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_and_restart, "FIRST_S", 0.0)
    monkeypatch.setattr(loop, "SWEEP_EVERY_S", 0.01)


def start(folder: Path, job: TrainJob = RARELY_SAVED) -> Run[LocalBackend]:
    return Run(folder, LocalBackend(), job)


async def forget(run: Run[LocalBackend], *names: str, run_id: str = RUN_ID) -> ForgetGroupsReply:
    service = ForgetService(
        run.journal,
        run.log,
        run.intake,
        run.engine,
        run.loop.between_steps,
        lambda: run.loop.has_planned,
        RUN_ID,
    )
    return await service.forget(ForgetGroupsRequest(run_id=run_id, group_ids=list(names)))


async def _without_engine(action: Action[Result]) -> Result:
    return await action(None)


async def kill(run: Run[LocalBackend]) -> None:
    """End the run without a last checkpoint, as a crash does."""
    run.task.cancel()
    run.journal.close()


async def test_a_checkpoint_is_saved_first_and_a_killed_server_trains_nothing_again(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    await run.finish_group("a")
    await run.trained("a")
    assert run.saved_steps == []
    reply = await forget(run, "a")
    assert (reply.success, reply.num_calls, reply.checkpoint_step) == (True, 2, 1)
    assert reply.versions == [run.log.version]
    assert run.journal.read(num_calls, ["a"]) == 0
    theta = run.backend.served_theta
    await kill(run)

    again = start(tmp_path)
    await again.rolling()
    assert again.backend.served_theta == theta
    assert [entry.kind for entry in again.log.entries_after(0) if entry.kind == "step"] == ["step"]
    assert again.trained_groups == {"a": 1}
    await again.stop()


async def test_groups_before_the_checkpoint_need_no_other_one(tmp_path: Path) -> None:
    run = start(tmp_path, JOB)
    await run.finish_group("a")
    await run.trained("a")
    assert (await forget(run, "a")).checkpoint_step is None
    assert run.saved_steps == [1]
    await run.stop()


async def test_the_log_counts_the_forgotten_groups_and_their_calls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, forget_service.log.name)
    run = start(tmp_path, PAIRS)
    await run.finish_group("a")
    await forget(run, "a")
    assert "forgotten groups: 1, their calls: 2" in caplog.messages
    await run.stop()


async def test_groups_that_wait_and_open_groups_are_dropped(tmp_path: Path) -> None:
    run = start(tmp_path, PAIRS)
    await run.finish_group("waits")
    await run.capture("open", call(), call())
    reply = await forget(run, "waits", "open", "unknown")
    assert (reply.success, reply.num_dropped, reply.num_calls) == (True, 2, 4)
    await run.journal.flush()
    assert run.dropped_groups == {"waits": "forgotten", "open": "forgotten"}
    assert run.pool.num_finished == run.pool.num_open == 0
    await run.capture("open", call())
    refused = await run.end_group("open", 1.0, 0.0)
    assert (refused.success, refused.failure_reason) == (False, "forgotten")
    await run.stop()


async def test_a_step_that_a_crash_undid_is_trained_without_the_forgotten_group(
    tmp_path: Path,
) -> None:
    run = start(tmp_path, PAIRS)
    await run.finish_group("a")
    await run.finish_group("b")
    await run.trained("a")
    await kill(run)

    # The engine is off, so no checkpoint can be saved.
    off = start(tmp_path, PAIRS)
    off.task.cancel()
    off.loop.has_ended = True
    service = ForgetService(
        off.journal, off.log, off.intake, off.engine, _without_engine, lambda: False, RUN_ID
    )
    reply = await service.forget(ForgetGroupsRequest(group_ids=["a"]))
    assert (reply.success, reply.checkpoint_step) == (True, None)
    off.journal.close()

    again = start(tmp_path, PAIRS)
    await again.trained("b")
    await again.journal.flush()
    assert again.dropped_groups == {"a": "forgotten"}
    assert again.trained_groups == {"b": 1}
    await again.stop()


async def test_another_run_is_refused(tmp_path: Path) -> None:
    run = start(tmp_path)
    await run.finish_group("a")
    reply = await forget(run, "a", run_id="another")
    assert not reply.success and "another" in reply.failure_reason
    await run.stop()


async def test_a_repeated_request_changes_nothing(tmp_path: Path) -> None:
    run = start(tmp_path)
    await run.finish_group("a")
    await run.trained("a")
    await forget(run, "a")
    entries = run.log.entries_after(0)
    reply = await forget(run, "a")
    assert (reply.success, reply.num_calls, reply.num_dropped) == (True, 0, 0)
    assert run.log.entries_after(0) == entries and run.saved_steps == [1]
    await run.stop()


async def test_a_request_that_arrives_after_its_group_was_forgotten_is_refused(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    await forget(run, "late", "feedback:a/f")
    await run.capture("late", call())
    assert (await run.end_group("late", 1.0, 0.0)).failure_reason == "forgotten"
    sample = run.pool.add_sample("feedback:a/f", [call()], 1.0, 1)
    assert (sample.success, sample.failure_reason) == (False, "forgotten")
    assert run.journal.read(num_calls, ["late"]) == 0
    await run.stop()
