"""The training loop over a rollout and a trainer apart: the loss of one is not the other's."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from swarm_server import local_engines
from swarm_server.local_engines import LocalRollout, LocalTrainer
from swarm_server.loops import JOB, Parts

from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.backends.process import backend_pairs
from fakevllm_server.backends.process.backend_pairs import MEMORY, TwoProcesses, weights_folder
from fakevllm_server.training import guards, loop, step
from fakevllm_server.types.backend import ActionFailed, BackendError


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "FIRST_S", 0.0)
    monkeypatch.setattr(step, "RETRY_STEP_AFTER_S", 0.0)
    monkeypatch.setattr(loop, "SWEEP_EVERY_S", 0.01)


async def test_a_dead_trainer_is_started_again_while_calls_go_on_being_answered(
    tmp_path: Path,
) -> None:
    parts = Parts(tmp_path)
    run = parts.run
    await run.finish_group("a")
    await run.trained("a")
    parts.trainer.may_launch.clear()
    parts.trainer.die("the trainer exited with code 9")
    await run.until(lambda: run.engine.status is EngineStatus.WEIGHT_SYNCING)
    assert run.engine.is_serving
    assert run.engine.detail == "the trainer exited with code 9"
    parts.trainer.may_launch.set()
    await run.finish_group("b")
    await run.trained("b")
    assert (parts.rollout.num_launched, parts.trainer.num_launched) == (1, 2)
    assert len(run.endpoints) == 1
    assert run.trained_groups == {"a": 1, "b": 2}
    await run.stop()


async def test_what_a_dead_trainer_had_not_saved_is_trained_again_as_it_was_planned(
    tmp_path: Path,
) -> None:
    parts = Parts(tmp_path)
    run = parts.run
    await run.finish_group("a")
    await run.trained("a")
    parts.trainer.plan("save", OSError("disk full"))
    await run.finish_group("b")
    await run.trained("b")
    parts.trainer.die("gone")
    await run.until(lambda: parts.rollout.loaded == [0, 1, 2, 3, 4])
    await run.rolling()
    assert run.engine.global_step == 3 and parts.trainer.steps == [1, 2, 2]
    assert (run.trained_groups, run.dropped_groups) == ({"a": 1, "b": 2}, {})
    told = [(entry.kind, entry.step, entry.version) for entry in run.log.entries_after(0)]
    assert told == [("step", 1, 1), ("step", 2, 2), ("restored", 1, 3), ("step", 2, 4)]
    await run.stop()


async def test_a_rollout_engine_that_dies_in_a_step_costs_no_step_and_no_group(
    tmp_path: Path,
) -> None:
    parts = Parts(tmp_path)
    run = parts.run
    parts.trainer.may_step.clear()
    await run.finish_group("a")
    await parts.trainer.step_begun.wait()
    parts.rollout.die("the engine exited with code 9")
    parts.trainer.may_step.set()
    await run.trained("a")
    await run.finish_group("b")
    await run.trained("b")
    assert (parts.rollout.num_launched, parts.trainer.num_launched) == (2, 1)
    assert parts.trainer.steps == [1, 2]
    assert parts.rollout.loaded == [0, 1, 2], "the new engine samples what was trained meanwhile"
    assert run.dropped_groups == {}
    assert len(run.endpoints) == 2
    await run.stop()


async def test_an_idle_rollout_engine_that_dies_gets_the_last_weights_again(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    run = parts.run
    await run.finish_group("a")
    await run.trained("a")
    parts.rollout.may_launch.clear()
    parts.rollout.die("gone")
    await run.until(lambda: run.engine.status is EngineStatus.BOOTING)
    parts.rollout.may_launch.set()
    await run.rolling()
    assert parts.rollout.loaded == [0, 1, 1]
    assert (run.engine.version, run.engine.global_step) == (1, 2)
    await run.stop()


async def test_weights_that_cannot_be_pushed_are_pushed_again(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    run = parts.run
    await run.rolling()
    parts.rollout.plan("load_weights", ActionFailed("no room"))
    await run.finish_group("a")
    await run.trained("a")
    await run.until(lambda: parts.rollout.loaded == [0, 1])
    assert (parts.rollout.num_launched, parts.trainer.num_launched) == (1, 1)
    await run.stop()


async def test_where_both_died_the_trainer_is_restored_however_often_the_other_fails(
    tmp_path: Path,
) -> None:
    parts = Parts(tmp_path)
    run = parts.run
    await run.finish_group("a")
    await run.trained("a")
    parts.rollout.plan("launch", BackendError("no memory"), BackendError("no memory"))
    parts.rollout.die("gone")
    parts.trainer.die("gone too")
    await run.finish_group("b")
    await run.trained("b")
    assert (parts.rollout.num_launched, parts.trainer.num_launched) == (2, 2)
    assert run.trained_groups == {"a": 1, "b": 2}
    await run.stop()


async def test_a_stop_between_two_rollout_engines_saves_what_was_trained(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    run = parts.run
    await run.rolling()
    parts.trainer.plan("save", OSError("disk full"))
    await run.finish_group("a")
    await run.trained("a")
    parts.rollout.may_launch.clear()
    parts.rollout.die("gone")
    await run.until(lambda: run.engine.status is EngineStatus.BOOTING)
    await run.stop()
    assert run.saved_steps == [1]


async def test_weights_leave_nothing_behind_and_what_was_left_is_not_in_the_way(
    tmp_path: Path,
) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "old.safetensors").write_text("of a server that was killed")
    parts = Parts(tmp_path)
    run = parts.run
    await run.finish_group("a")
    await run.trained("a")
    assert parts.rollout.loaded == [0, 1]
    assert not (tmp_path / "weights").exists()
    await run.stop()


def test_the_folder_for_weights_is_the_runs_own_and_in_memory_unless_told(tmp_path: Path) -> None:
    one, other = (weights_folder(tmp_path / name, tmp_path) for name in ("one", "other"))
    assert one != other
    assert one == weights_folder(tmp_path / "one", tmp_path)
    assert one.parent == tmp_path
    in_memory = weights_folder(tmp_path, None).parent
    assert in_memory == (MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir()))


async def test_a_rollout_engine_that_dies_while_the_trainer_is_down_is_not_taken_for_serving(
    tmp_path: Path,
) -> None:
    parts = Parts(tmp_path)
    run = parts.run
    await run.finish_group("a")
    await run.trained("a")
    parts.trainer.may_launch.clear()
    parts.trainer.die("gone")
    await run.until(lambda: run.engine.status is EngineStatus.WEIGHT_SYNCING)
    parts.trainer.plan("launch", BackendError("no memory"))
    parts.rollout.may_launch.clear()
    parts.rollout.die("gone too")
    parts.trainer.may_launch.set()
    await run.until(lambda: run.engine.status is EngineStatus.BOOTING)
    parts.rollout.may_launch.set()
    await run.rolling()
    assert parts.rollout.loaded[-1] == run.engine.version == 2
    await run.stop()


async def test_the_last_step_is_saved_though_its_weights_arrived_late(tmp_path: Path) -> None:
    job = JOB.model_copy(update={"total_training_steps": 1, "save_freq": 100})
    parts = Parts(tmp_path, job)
    run = parts.run
    await run.rolling()
    parts.rollout.plan("load_weights", BackendError("connection lost"))
    await run.finish_group("a")
    await run.until(lambda: bool(run.saved_steps))
    assert run.saved_steps == [1]
    await run.stop()


async def test_an_engine_that_is_slow_to_say_it_is_well_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_pairs, "QUICK_CHECK_S", local_engines.SLOW_CHECK_S / 2)
    parts = Parts(tmp_path)
    run = parts.run
    await run.finish_group("a")
    await run.trained("a")
    parts.trainer.num_slow_checks = 2
    parts.rollout.die("gone")
    await run.finish_group("b")
    await run.trained("b")
    assert (parts.rollout.num_launched, parts.trainer.num_launched) == (2, 1)
    assert run.dropped_groups == {}
    await run.stop()


async def test_a_refusing_engine_serves_what_was_trained_before(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    run = parts.run
    await run.finish_group("a")
    await run.trained("a")
    parts.rollout.refusal = "its logprobs leave the temperature out"
    parts.rollout.die("gone")
    await run.until(lambda: run.engine.detail == parts.rollout.refusal)
    assert run.engine.status is EngineStatus.ROLLING
    assert parts.rollout.loaded == [0, 1, 1]
    await run.stop()


async def test_a_trainer_of_another_engine_is_handed_no_sets_of_tokens(tmp_path: Path) -> None:
    """verl knows the whole vocabulary alone: calls that were held to a part are not trained."""
    backend = TwoProcesses(LocalRollout(), LocalTrainer(), tmp_path / "weights")
    assert (await backend.start()).endpoint.reports_allowed is False
    await backend.close()
