"""The training loop with separate rollout and trainer processes, of which one may die."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from swarm_server import local_engines
from swarm_server.local_engines import LocalRollout, LocalTrainer, SleepingRollout
from swarm_server.loops import JOB, Parts

from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.backends.process import rollout_trainer_pairs
from fakevllm_server.backends.process.rollout_trainer_pairs import (
    MEMORY,
    TwoProcesses,
    kept_weights_folder,
    remove_left_weights,
    weights_folder,
)
from fakevllm_server.training import loop, step, stop_and_restart
from fakevllm_server.types.backend import ActionFailed, BackendError


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_and_restart, "FIRST_S", 0.0)
    monkeypatch.setattr(step, "RETRY_STEP_AFTER_S", 0.0)
    monkeypatch.setattr(loop, "SWEEP_EVERY_S", 0.01)


async def test_a_dead_trainer_is_restarted_while_calls_are_answered(
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


async def test_unsaved_steps_of_a_dead_trainer_are_trained_again_as_planned(
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
    entries = [(entry.kind, entry.step, entry.version) for entry in run.log.entries_after(0)]
    assert entries == [("step", 1, 1), ("step", 2, 2), ("restored", 1, 3), ("step", 2, 4)]
    await run.stop()


async def test_no_step_or_group_is_lost_if_the_rollout_engine_dies_during_a_step(
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
    assert parts.rollout.loaded == [0, 1, 2], "the new engine gets the newest weights"
    assert run.dropped_groups == {}
    assert len(run.endpoints) == 2
    await run.stop()


async def test_a_restarted_rollout_engine_gets_the_last_weights_again(tmp_path: Path) -> None:
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


async def test_loading_weights_is_retried_after_a_failure(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    run = parts.run
    await run.rolling()
    parts.rollout.plan("load_weights", ActionFailed("no room"))
    await run.finish_group("a")
    await run.trained("a")
    await run.until(lambda: parts.rollout.loaded == [0, 1])
    assert (parts.rollout.num_launched, parts.trainer.num_launched) == (1, 1)
    await run.stop()


async def test_the_trainer_is_restored_while_the_rollout_engine_keeps_failing(
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


async def test_a_stop_without_a_rollout_engine_saves_the_trained_steps(tmp_path: Path) -> None:
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


async def test_the_weights_folder_is_deleted_and_old_files_in_it_do_no_harm(
    tmp_path: Path,
) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "old.safetensors").write_text("left by a killed server")
    parts = Parts(tmp_path)
    run = parts.run
    await run.finish_group("a")
    await run.trained("a")
    assert parts.rollout.loaded == [0, 1]
    assert not (tmp_path / "weights").exists()
    await run.stop()


def test_each_run_has_its_own_weights_folder_which_is_in_memory_by_default(tmp_path: Path) -> None:
    one, other = (weights_folder(tmp_path / name, tmp_path) for name in ("one", "other"))
    assert one != other
    assert one == weights_folder(tmp_path / "one", tmp_path)
    assert one.parent == tmp_path
    in_memory = weights_folder(tmp_path, None).parent
    assert in_memory == (MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir()))


def test_the_weights_that_a_killed_server_has_left_are_removed_and_no_others(
    tmp_path: Path,
) -> None:
    own, other = (weights_folder(tmp_path / name, tmp_path) for name in ("one", "other"))
    in_memory = weights_folder(tmp_path / "one", None)
    left = [own, kept_weights_folder(own), kept_weights_folder(in_memory)]
    for folder in (*left, other):
        folder.mkdir()
        (folder / "weights").touch()
    remove_left_weights(tmp_path / "one", tmp_path)
    assert not any(folder.exists() for folder in left)
    assert other.exists()


async def test_a_rollout_engine_that_dies_while_the_trainer_is_down_is_noticed(
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


async def test_the_last_step_is_saved_even_if_loading_its_weights_is_retried(
    tmp_path: Path,
) -> None:
    job = JOB.model_copy(update={"total_training_steps": 1, "save_freq": 100})
    parts = Parts(tmp_path, job)
    run = parts.run
    await run.rolling()
    parts.rollout.plan("load_weights", BackendError("connection lost"))
    await run.finish_group("a")
    await run.until(lambda: bool(run.saved_steps))
    assert run.saved_steps == [1]
    await run.stop()


async def test_a_slow_health_check_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_trainer_pairs, "QUICK_CHECK_S", local_engines.SLOW_CHECK_S / 2)
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


async def test_an_engine_that_cannot_be_trained_with_serves_the_last_weights(
    tmp_path: Path,
) -> None:
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


async def test_a_trainer_in_another_process_gets_no_allowed_token_sets(tmp_path: Path) -> None:
    """verl normalizes over the whole vocabulary, so grammar-constrained calls are not trained."""
    backend = TwoProcesses(LocalRollout(), LocalTrainer(), tmp_path / "weights")
    assert (await backend.start()).endpoint.reports_allowed is False
    await backend.close()


async def test_the_engine_sleeps_during_each_step_until_it_loads_the_new_weights(
    tmp_path: Path,
) -> None:
    rollout = SleepingRollout()
    parts = Parts(tmp_path, rollout=rollout)
    parts.trainer.may_step.clear()
    await parts.run.finish_group("a")
    await parts.trainer.step_begun.wait()
    assert rollout.is_asleep
    parts.trainer.may_step.set()
    await parts.run.trained("a")
    await parts.run.rolling()
    assert rollout.events == ["load 0", "sleep", "load 1"]
    await parts.run.stop()


async def test_a_step_that_fails_wakes_the_engine_up(tmp_path: Path) -> None:
    rollout = SleepingRollout()
    parts = Parts(tmp_path, rollout=rollout)
    parts.trainer.plan("step", ActionFailed("out of memory"))
    await parts.run.finish_group("a")
    await parts.run.trained("a")
    await parts.run.rolling()
    assert rollout.events == ["load 0", "sleep", "wake_up", "sleep", "load 1"]
    await parts.run.stop()


async def test_a_dead_trainer_leaves_no_sleeping_engine(tmp_path: Path) -> None:
    rollout = SleepingRollout()
    parts = Parts(tmp_path, rollout=rollout)
    parts.trainer.plan("step", BackendError("gone"))
    await parts.run.finish_group("a")
    await parts.run.trained("a")
    await parts.run.rolling()
    assert rollout.events[:3] == ["load 0", "sleep", "wake_up"]
    assert rollout.events[-2:] == ["sleep", f"load {rollout.loaded[-1]}"]
    await parts.run.stop()
