"""Decisions about versions: what is refused, what is recorded, and how training goes back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from swarm_server.local_backend import LocalBackend
from swarm_server.loops import JOB, Parts, Run, without_copies
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.releases import Decision
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.backends.fake.engine import START_THETA
from fakevllm_server.episodes.submissions import IdempotencyConflict
from fakevllm_server.journal import reads
from fakevllm_server.journal.store import Journal
from fakevllm_server.training import loop, release_service, step, stop_and_restart
from fakevllm_server.training.release_service import DecisionPending
from fakevllm_server.types.backend import ActionFailed, BackendError, BackendRefused, BackendStart

CANDIDATE, RELEASED, REJECTED, UNDECIDED, HOLD, RESUME = Decision
YES, NO = (ord("y"), 6), (ord("n"), 6)
RARELY_SAVED = JOB.model_copy(update={"save_freq": 100})


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_and_restart, "FIRST_S", 0.0)
    monkeypatch.setattr(loop, "SWEEP_EVERY_S", 0.01)


def start(folder: Path, job: TrainJob = JOB) -> Run[LocalBackend]:
    return Run(folder, LocalBackend(), job)


async def train(run: Run[LocalBackend], *names: str) -> list[float]:
    """Train one group per step, and return the weights after each step."""
    weights: list[float] = []
    for name in names:
        await run.rolling()
        version = run.engine.version
        await run.capture(name, call(version, ids=YES), call(version, ids=NO))
        assert (await run.end_group(name, 1.0, 0.0)).pooled
        await run.trained(name)
        weights.append(run.backend.served_theta)
    return weights


class BrokenBackend(LocalBackend):
    """A backend that cannot be started while it is broken."""

    is_broken = False

    async def start(self) -> BackendStart:
        if self.is_broken:
            raise BackendError("there is no memory")
        return await super().start()


def decisions(run: Run[LocalBackend]) -> list[tuple[str, int | None, int | None, str]]:
    return [
        (record.decision.value, record.version, record.parent, record.decided_by)
        for record in run.releases.reply().records
    ]


@pytest.mark.parametrize(
    ("id", "name"),
    [("gate-1", "gate"), ("guard-run-3-refusals", "guard"), ("guardian-1", "alice")],
)
async def test_the_id_of_a_decision_says_whether_gate_or_guard_makes_it(
    tmp_path: Path, id: str, name: str
) -> None:
    run = start(tmp_path, RARELY_SAVED)
    reply = await run.decide(HOLD, id=id)
    assert reply.record is not None
    assert reply.record.decided_by == name
    await run.stop()


async def test_the_newest_version_becomes_the_candidate_and_its_checkpoint_is_saved(
    tmp_path: Path,
) -> None:
    run = start(tmp_path, RARELY_SAVED)
    await train(run, "a", "b")
    assert run.saved_steps == []
    reply = await run.decide(CANDIDATE, id="gate-1", evidence={"why": "20 steps"})
    assert reply.record is not None
    assert (reply.record.version, reply.record.decided_by) == (2, "gate")
    assert reply.record.evidence == {"why": "20 steps"}
    assert run.saved_steps == [2] and run.releases.state.candidate == 2
    await run.stop()


async def test_a_decision_is_made_once_and_another_one_with_its_id_is_refused(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    await train(run, "a")
    first, again = await asyncio.gather(run.decide(RELEASED, 1), run.decide(RELEASED, 1))
    later = await run.decide(RELEASED, 1)
    assert first == again == later and first.success
    assert decisions(run) == [("released", 1, 0, "alice")]
    with pytest.raises(IdempotencyConflict):
        await run.decide(REJECTED, 1, id="released 1")
    with pytest.raises(IdempotencyConflict):
        await run.roll_back(1, id="released 1")
    await run.stop()


async def test_decisions_that_cannot_be_made_are_refused_in_one_line(tmp_path: Path) -> None:
    run = start(tmp_path, JOB.model_copy(update={"save_freq": 2}))

    async def refusal(decision: Decision, version: int | None = None) -> str:
        reply = await run.decide(decision, version)
        assert not reply.success and reply.record is None and "\n" not in reply.failure_reason
        return reply.failure_reason

    await run.rolling()
    assert "wait for the next training step" in await refusal(CANDIDATE)
    await train(run, "a", "b", "c")
    assert "Name the version" in await refusal(RELEASED)
    assert await refusal(RELEASED, 9) == "Version 9 does not exist: the newest is 3."
    assert "have one: 0, 2." in await refusal(RELEASED, 1)
    assert "cannot be rejected" in await refusal(REJECTED, 0)
    assert (await run.decide(HOLD)).success
    for decision in (CANDIDATE, RELEASED):
        assert "`resume`" in await refusal(decision, 2)
    assert (await run.decide(RESUME)).success and (await run.decide(RELEASED, 2)).success
    assert (await run.decide(REJECTED, 3)).success
    assert "send `force`" in await refusal(RELEASED, 3)
    assert "released already" in await refusal(CANDIDATE)
    assert [record.decision for record in run.releases.reply().records] == [
        HOLD,
        RESUME,
        RELEASED,
        REJECTED,
    ]
    await run.stop()


async def test_a_rejection_restores_the_released_version_and_training_goes_on_from_there(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    released, _, _ = await train(run, "a", "b", "c")
    await run.decide(RELEASED, 1)
    reply = await run.decide(REJECTED, 2)
    await run.rolling()
    assert reply.record is not None and reply.record.evidence == {"restored": 1}
    assert run.releases.reply().rejected == [2, 3]
    assert run.backend.served_theta == released
    assert (run.engine.version, run.log.last_step, run.engine.global_step) == (4, 1, 2)
    assert run.saved_steps == [1] and run.backend.num_launched == 1
    assert run.dropped_groups == {"b": "rejected_version", "c": "rejected_version"}
    (again,) = await train(run, "d")
    assert run.trained_groups == {"a": 1, "d": 2} and again != released
    assert decisions(run)[-1] == ("rejected", 2, 0, "alice")
    await run.stop()


@pytest.mark.parametrize("released", [0, 1])
async def test_a_copy_of_the_released_version_is_never_rejected_but_what_was_trained_from_it(
    tmp_path: Path, released: int
) -> None:
    run = start(tmp_path)
    await train(run, "a", "b")
    if released:
        await run.decide(RELEASED, 1)
    await run.decide(REJECTED, released + 1)
    await run.rolling()
    copy = run.engine.version
    refused = await run.decide(REJECTED, copy, id="too early")
    assert "nothing to go back from" in refused.failure_reason
    await train(run, "c", "d")
    reply = await run.decide(REJECTED, copy, id="again")
    assert reply.record is not None and reply.record.version == copy + 1
    assert run.journal.read(reads.releases)[-1].record == reply.record
    assert run.releases.reply().rejected == [*range(released + 1, 3), copy + 1, copy + 2]
    await run.rolling()
    assert run.log.last_step == released
    assert (await run.decide(REJECTED, copy, id="again")).record == reply.record
    await run.stop()


async def test_waiting_and_late_groups_of_rejected_versions_are_dropped_with_the_reason(
    tmp_path: Path,
) -> None:
    run = start(tmp_path, JOB.model_copy(update={"batch_size": 2}))
    for name in ("a", "b", "c", "d"):
        await run.finish_group(name)
    await run.trained("d")
    await run.decide(RELEASED, 1)
    await run.capture("waiting", call(1), call(2))
    assert (await run.end_group("waiting", 1.0, 0.0)).pooled
    await run.capture("late", call(2), call(1))
    await run.decide(REJECTED, 2)
    await run.rolling()
    assert (await run.end_group("late", 1.0, 0.0)).failure_reason == "rejected_version"
    await run.journal.flush()
    assert run.dropped_groups["waiting"] == run.dropped_groups["late"] == "rejected_version"
    await run.pool_group("of the released version")
    assert run.pool.num_finished == 1
    await run.stop()


async def test_a_rejection_during_a_step_waits_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(tmp_path)
    await train(run, "a", "b")
    await run.decide(RELEASED, 1)
    monkeypatch.setattr(release_service, "REPLY_WITHIN_S", 0.0)
    run.backend.step_begun.clear()
    run.backend.may_step.clear()
    await run.finish_group("c")
    await run.backend.step_begun.wait()
    with pytest.raises(DecisionPending):
        await run.decide(REJECTED, 2)
    assert run.log.last_step == 2
    monkeypatch.setattr(release_service, "REPLY_WITHIN_S", 10.0)
    run.backend.may_step.set()
    assert (await run.decide(REJECTED, 2)).success
    await run.rolling()
    assert run.releases.reply().rejected == [2, 3]
    assert run.trained_groups == {"a": 1}
    await run.stop()


async def test_if_no_version_was_released_training_goes_back_to_the_model_itself(
    tmp_path: Path,
) -> None:
    parts = Parts(tmp_path)
    run = parts.run
    await run.finish_group("a")
    await run.trained("a")
    assert (await run.decide(REJECTED, 1)).success
    await run.until(lambda: parts.trainer.num_launched == 2)
    await run.rolling()
    assert run.saved_steps == [] and run.log.last_step == 0
    assert parts.rollout.engine is not None and parts.trainer.engine is not None
    assert parts.rollout.num_launched == 1
    await run.finish_group("b")
    await run.trained("b")
    assert run.trained_groups == {"b": 1}
    assert parts.rollout.loaded == sorted(set(parts.rollout.loaded))
    await run.stop()


async def test_training_goes_back_to_a_version_that_the_operator_names(tmp_path: Path) -> None:
    run = start(tmp_path)
    weights = await train(run, "a", "b", "c")
    await run.decide(RELEASED, 3)
    assert (await run.roll_back(2)).success
    await run.rolling()
    assert run.backend.served_theta == weights[1]
    assert (run.releases.state.released, run.releases.state.rejected) == (0, {3})
    refused = await run.roll_back(3, id="other")
    assert "was rejected" in refused.failure_reason
    assert "nothing to go back from" in (await run.roll_back(4, id="new")).failure_reason
    await run.stop()


async def test_a_damaged_checkpoint_changes_nothing(tmp_path: Path) -> None:
    run = start(tmp_path)
    weights = await train(run, "a", "b")
    await run.decide(RELEASED, 1)
    for file in (tmp_path / "checkpoints" / "step-00000001").iterdir():
        file.write_text("damaged")
    reply = await run.decide(REJECTED, 2)
    assert not reply.success and "step-00000001 is damaged" in reply.failure_reason
    assert "0, 1, 2" in reply.failure_reason
    assert (run.backend.served_theta, run.engine.version) == (weights[-1], 2)
    assert len(decisions(run)) == 1 and run.saved_steps == [2, 1]
    await train(run, "c")
    assert run.trained_groups == {"a": 1, "b": 2, "c": 3}
    await run.stop()


async def test_a_trainer_that_cannot_restore_the_checkpoint_continues_with_the_newest_weights(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    await train(run, "a", "b")
    await run.decide(RELEASED, 1)
    run.backend.plan("restore", ActionFailed("it does not fit"))
    reply = await run.decide(REJECTED, 2)
    assert "it does not fit" in reply.failure_reason
    await run.until(lambda: run.backend.num_launched == 2)
    await train(run, "c")
    assert run.trained_groups == {"a": 1, "b": 2, "c": 3} and len(decisions(run)) == 1
    await run.stop()


async def test_a_trainer_that_dies_during_a_rejection_is_restarted_and_nothing_has_changed(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    await train(run, "a", "b")
    await run.decide(RELEASED, 1)
    run.backend.plan("restore", BackendError("gone"))
    with pytest.raises(BackendError):
        await run.decide(REJECTED, 2)
    await run.until(lambda: run.backend.num_launched == 2)
    await run.rolling()
    assert run.trained_groups == {"a": 1, "b": 2} and len(decisions(run)) == 1
    assert (await run.decide(REJECTED, 2)).success
    await run.rolling()
    assert run.backend.num_launched == 2 and run.log.last_step == 1
    await run.stop()


@pytest.mark.parametrize("failure", [BackendError("gone"), ActionFailed("no")])
async def test_a_publish_that_fails_after_a_rejection_is_made_up_for_by_the_next_start(
    tmp_path: Path, failure: BackendError
) -> None:
    parts = Parts(tmp_path, JOB.model_copy(update={"batch_size": 2}))
    run = parts.run
    for name in "abcd":
        await run.finish_group(name)
    await run.trained("d")
    await run.decide(RELEASED, 1)
    await run.capture("waiting", call(2), call(2))
    await run.end_group("waiting", 1.0, 0.0)
    parts.rollout.plan("load_weights", failure)
    with pytest.raises(BackendError):
        await run.decide(REJECTED, 2)
    await run.until(lambda: len(parts.rollout.loaded) > 3)
    await run.rolling()
    assert (await run.decide(REJECTED, 2)).success and len(run.releases.reply().records) == 2
    await run.journal.flush()
    assert run.log.last_step == 1 and run.pool.num_finished == 0
    assert run.dropped_groups["waiting"] == "rejected_version"
    await run.stop()


async def test_the_checkpoints_of_the_released_version_and_of_pinned_ones_are_kept(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    await train(run, *"abcde")
    await run.decide(RELEASED, 3, pinned=[4])
    weights = await train(run, *"fghijk")
    assert run.saved_steps == [11, 10, 9, 4, 3]
    query = "SELECT DISTINCT group_id FROM calls ORDER BY 1"
    kept = [row[0] for row in run.journal.read(lambda db: db.exec_driver_sql(query).all())]
    assert kept == ["j", "k"]
    assert (await run.decide(REJECTED, 5)).success
    await run.rolling()
    assert (run.log.last_step, run.saved_steps) == (3, [3])
    assert run.backend.served_theta not in weights
    await run.stop()


async def test_a_rejected_version_can_be_released_by_force_and_training_can_go_back_to_it(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    weights = await train(run, "a", "b", "c")
    await run.decide(RELEASED, 1)
    await run.decide(REJECTED, 2)
    await train(run, "d", "e")
    assert run.saved_steps == [3, 2, 1]
    assert "`force`" in (await run.decide(RELEASED, 2)).failure_reason
    assert "has no checkpoint" in (await run.decide(RELEASED, 3, force=True)).failure_reason
    assert (await run.decide(RELEASED, 2, force=True)).success
    assert run.releases.reply().rejected == [3]
    await train(run, "f")
    assert (await run.roll_back(None)).success
    await run.rolling()
    assert run.backend.served_theta == weights[1]
    assert (run.log.last_step, run.saved_steps) == (2, [2, 1])
    assert run.trained_groups == {"a": 1}
    assert {run.dropped_groups[name] for name in "bcdef"} == {"rejected_version"}
    await train(run, "g")
    assert run.trained_groups == {"a": 1, "g": 3}
    before = run.releases.reply()
    await run.stop()
    again = start(tmp_path)
    await again.rolling()
    assert again.releases.state == run.releases.state
    assert without_copies(again.releases.reply()) == without_copies(before)
    assert (await again.decide(REJECTED, 2, id="again")).success
    await again.rolling()
    assert again.backend.served_theta == weights[0] and again.log.last_step == 1
    await again.stop()


async def test_the_kept_checkpoint_of_a_rejected_version_is_not_overwritten_by_its_step(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    weights = await train(run, "a", "b")
    await run.decide(RELEASED, 1)
    await run.decide(REJECTED, 2)
    await train(run, "c")
    names = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002", "step-00000002-v4"]
    await run.decide(RELEASED, 2, force=True)
    await run.roll_back(2)
    await run.rolling()
    assert run.backend.served_theta == weights[1]
    await run.stop()


async def test_training_that_had_finished_goes_on_after_a_rejection(tmp_path: Path) -> None:
    run = start(tmp_path, JOB.model_copy(update={"total_training_steps": 2}))
    await train(run, "a", "b")
    await run.decide(RELEASED, 1)
    assert run.loop.closed_reason == "training_finished"
    await run.decide(REJECTED, 2)
    await train(run, "c")
    assert run.trained_groups == {"a": 1, "c": 2}
    assert run.loop.closed_reason == "training_finished"
    await run.stop()


async def test_a_decision_that_waits_when_the_loop_ends_is_reported_as_not_made(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    await train(run, "a", "b")
    run.backend.may_step.clear()
    run.backend.step_begun.clear()
    await run.finish_group("c")
    await run.backend.step_begun.wait()
    waiting = asyncio.create_task(run.decide(REJECTED, 2))
    await asyncio.sleep(0)
    run.backend.may_step.set()
    await run.stop()
    with pytest.raises(loop.LoopEnded):
        await waiting
    assert run.engine.status is not EngineStatus.OFFLINE and decisions(run) == []


async def test_the_history_and_the_weights_survive_a_restart(tmp_path: Path) -> None:
    run = start(tmp_path)
    weights = await train(run, "a", "b", "c")
    await run.decide(RELEASED, 2)
    await run.decide(REJECTED, 3)
    await run.rolling()
    before = run.releases.reply()
    await run.stop()
    after = start(tmp_path)
    await after.rolling()
    assert after.releases.state == run.releases.state
    assert without_copies(after.releases.reply()) == without_copies(before)
    assert after.backend.served_theta == weights[1] != START_THETA
    assert (after.log.last_step, after.engine.version) == (2, 5)
    assert await train(after, "d") and after.trained_groups == {"a": 1, "b": 2, "d": 3}
    assert (await after.decide(REJECTED, 3)).record == before.records[-1]
    await after.stop()


async def test_a_version_is_rejected_while_the_engine_cannot_start(tmp_path: Path) -> None:
    backend = BrokenBackend()
    run = Run[LocalBackend](tmp_path, backend)
    weights = await train(run, "a", "b")
    await run.decide(RELEASED, 1)
    backend.is_broken = True
    backend.dead.set_result("killed")
    await run.until(lambda: run.engine.status is EngineStatus.BOOTING)
    assert (await run.decide(REJECTED, 2)).success
    assert run.log.last_step == 1 and run.saved_steps == [1]
    backend.is_broken = False
    await run.rolling()
    assert (run.engine.version, run.backend.served_theta) == (4, weights[0])
    await train(run, "c")
    assert run.log.last_step == 2
    await run.stop()


async def test_a_version_is_rejected_although_the_trainer_refuses_the_job(tmp_path: Path) -> None:
    run = start(tmp_path)
    weights = await train(run, "a", "b")
    await run.decide(RELEASED, 1)
    await run.stop()
    run = start(tmp_path)
    run.backend.plan("boot", *[BackendRefused("name another module") for _ in range(2)])
    await run.rolling()
    assert run.loop.closed_reason == "training_refused"
    assert (await run.decide(REJECTED, 2)).success
    await run.until(lambda: run.engine.version > run.releases.state.released + 2)
    await run.rolling()
    assert run.backend.served_theta == weights[0] and run.log.last_step == 1
    assert run.loop.closed_reason == "training_refused"
    await run.stop()


async def test_failures_of_a_step_that_was_left_do_not_count_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "RETRY_STEP_AFTER_S", 0.2)
    run = start(tmp_path)
    await train(run, "a", "b")
    await run.decide(RELEASED, 1)
    failures = [ActionFailed("no memory") for _ in range(step.MAX_FAILURES)]
    run.backend.plan("step", *failures[1:])
    await run.pool_group("bad")
    await run.until(lambda: not run.backend.failures["step"])
    await run.rolling()
    assert (await run.roll_back(1)).success
    await run.rolling()
    run.backend.plan("step", *failures[1:])
    await train(run, "good")
    assert "good" in run.trained_groups
    await run.stop()


async def test_a_stop_waits_for_the_save_of_a_candidate(tmp_path: Path) -> None:
    run = start(tmp_path, RARELY_SAVED)
    await train(run, "a")
    deciding = asyncio.create_task(run.decide(CANDIDATE))
    await run.until(lambda: run.engine.status is EngineStatus.WEIGHT_SYNCING)
    await run.stop()
    assert (await deciding).success
    journal = Journal(tmp_path / "journal.sqlite")
    assert [saved.version for saved in journal.read(reads.checkpoints)] == [1]
    journal.close()


async def test_pins_end_with_an_empty_list_also_after_a_restart(tmp_path: Path) -> None:
    run = start(tmp_path)
    await train(run, "a", "b")
    await run.decide(CANDIDATE, 2, pinned=[1])
    await run.decide(UNDECIDED, 2)
    assert run.releases.state.pinned == {0, 1}, "a decision without a list changes nothing"
    await run.stop()
    run = start(tmp_path)
    assert run.releases.state.pinned == {0, 1}
    await run.decide(RELEASED, 2, pinned=[])
    assert run.releases.state.pinned == {0, 2}
    await run.stop()


async def test_the_run_log_is_not_parsed_on_the_event_loop_when_training_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(tmp_path)
    await train(run, "a", "b")
    read, on_loop = run.journal.read, list[str]()

    def observe(query: Callable[..., Any], *arguments: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            on_loop.append(query.__name__)
        return read(query, *arguments)

    monkeypatch.setattr(run.journal, "read", observe)
    assert (await run.roll_back(1)).success
    slow = {"groups_trained_after", "step_metrics", "step_sources"}
    assert on_loop and slow.isdisjoint(on_loop)
    await run.rolling()
    await run.stop()
