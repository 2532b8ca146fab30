"""The training loop with an engine that fails in many ways."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest
from swarm_server.local_backend import LocalBackend
from swarm_server.loops import JOB, Run
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import SiblingRef
from fakevllm_server.backends.fake.engine import START_THETA
from fakevllm_server.episodes import open_groups
from fakevllm_server.training import loop, stop_and_restart
from fakevllm_server.training import step as steps
from fakevllm_server.types.backend import (
    ActionFailed,
    BackendError,
    Batch,
    LossSpec,
    StepMetrics,
)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_and_restart, "FIRST_S", 0.0)
    monkeypatch.setattr(steps, "RETRY_STEP_AFTER_S", 0.0)
    monkeypatch.setattr(loop, "SWEEP_EVERY_S", 0.01)


def start(folder: Path, job: TrainJob = JOB) -> Run[LocalBackend]:
    return Run(folder, LocalBackend(), job)


@pytest.mark.parametrize(
    ("action", "failure"),
    [
        ("launch", OSError("no process")),
        ("boot", BackendError("gone")),
        ("step", AttributeError("odd number")),
        ("step", BackendError("connection lost")),
    ],
)
async def test_an_engine_is_restarted_after_any_error_and_the_run_continues(
    tmp_path: Path, action: str, failure: Exception
) -> None:
    run = start(tmp_path)
    run.backend.plan(action, failure)
    await run.finish_group("a")
    await run.trained("a")
    assert run.backend.num_launched == 2 - (action == "launch")
    await run.stop()


async def test_a_full_disk_delays_the_checkpoint_and_does_not_restart_the_engine(
    tmp_path: Path,
) -> None:
    run = start(tmp_path, JOB.model_copy(update={"save_freq": 2}))
    run.backend.plan("save", OSError("disk full"))
    for name in "abc":
        await run.finish_group(name)
        await run.trained(name)
    assert run.backend.num_launched == 1
    assert run.saved_steps == [3]
    await run.stop()


async def test_a_step_that_the_engine_refuses_is_retried_without_a_restart(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.backend.plan("step", ActionFailed("no"), ActionFailed("no"))
    await run.finish_group("a")
    await run.trained("a")
    assert run.backend.num_launched == 1
    await run.stop()


async def test_a_step_that_is_tried_again_leaves_tasks_that_came_meanwhile_their_time(
    tmp_path: Path,
) -> None:
    method = "rollout_until_finish_enough_episodes"
    run = start(tmp_path, JOB.model_copy(update={"swarm_mode_sample_collection_method": method}))
    run.backend.plan("step", ActionFailed("no"), ActionFailed("no"))
    run.backend.may_step.clear()
    await run.finish_group("a")
    await run.backend.step_begun.wait()
    run.pool.add_episode("half", 1.0, [call()], "claim of an episode")
    run.backend.may_step.set()
    await run.until(lambda: run.log.last_step == 1)
    assert run.dropped_groups == {}
    assert [(task, len(episodes)) for task, episodes in run.pool.partial] == [("half", 1)]
    await run.stop()


def with_kl(**settings: object) -> TrainJob:
    return JOB.model_copy(update={"use_kl_in_reward": True, "kl_coef": 0.5} | settings)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (ActionFailed("no"), "step 1 failed, the engine goes on: no"),
        (BackendError("gone"), "gone; starting it again in 0 s"),
    ],
)
async def test_a_step_is_retried_if_the_reference_logprobs_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, failure: Exception, message: str
) -> None:
    run = start(tmp_path, with_kl())
    run.backend.plan("log_probs", failure)
    await run.finish_group("a")
    await run.trained("a")
    assert run.backend.log_prob_policies == ["reference"]
    assert message in caplog.messages
    await run.stop()


@pytest.mark.parametrize(
    ("bypass_mode", "policies"), [(True, ["reference"]), (False, ["trained", "reference"])]
)
async def test_kl_in_the_reward_moves_the_weights_towards_the_reference(
    tmp_path: Path, bypass_mode: bool, policies: list[str]
) -> None:
    """Rewards are tied, so that only KL has a gradient. "y" is likelier than in the reference."""
    run = start(tmp_path, with_kl(bypass_mode=bypass_mode))
    await run.rolling()
    run.backend._theta = START_THETA + 1.0  # pyright: ignore[reportPrivateUsage]
    for index, token in enumerate("yn"):
        answer = replace(call(ids=(ord(token), 256)), logprobs=[math.log(0.5), 0.0])
        await run.intake.add_call(SiblingRef("a", index), answer)
    await run.end_group("a", 1.0, 1.0)
    await run.trained("a")
    (entry,) = [one for one in run.log.entries_after(0) if one.kind == "step"]
    assert (entry.groups[0].siblings, run.backend.log_prob_policies) == ([0, 1], policies)
    # The two advantages are ∓1 / √2, and each answer's slope is ±1 / 2.
    expected = START_THETA + 1.0 - JOB.lr * 0.5 / math.sqrt(2)
    assert entry.metrics["theta"] == pytest.approx(expected)
    await run.stop()


@pytest.mark.parametrize("job", [JOB, with_kl(control="frozen")])
async def test_no_reference_logprobs_are_requested_without_kl_in_the_reward(
    tmp_path: Path, job: TrainJob
) -> None:
    run = start(tmp_path, job)
    await run.finish_group("a")
    await run.trained("a")
    assert run.backend.log_prob_policies == []
    await run.stop()


async def test_a_step_reports_the_calls_and_groups_that_it_excluded(tmp_path: Path) -> None:
    run = start(tmp_path, JOB.model_copy(update={"filter_groups": "collect", "max_staleness": 0}))
    await run.finish_group("a")
    await run.trained("a")
    await run.capture("tied", call(version=1), call(version=1))
    assert (await run.end_group("tied", 1.0, 1.0)).failure_reason == "tied"
    await run.capture("b", call(version=0), call(version=1), call(version=1))
    await run.end_group("b", 0.0, 1.0, 2.0)
    await run.trained("b")
    entry = [one for one in run.log.entries_after(0) if one.kind == "step"][-1]
    assert [group.siblings for group in entry.groups] == [[1, 2]]
    assert (entry.metrics["stale_calls"], entry.metrics["tied_groups"]) == (1, 1)
    assert entry.metrics["tie_rate"] == 0.5
    await run.stop()


class FailsHalfWay(LocalBackend):
    """An engine of which every second step fails after it has changed the weights."""

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        metrics = await super().step(batch, loss)
        if len(self.steps) % 2 == 0:
            raise BackendError("step: PartialStep: failed after an update was made")
        return metrics


async def test_a_step_that_failed_half_way_is_repeated_from_the_checkpoint(
    tmp_path: Path,
) -> None:
    checkpoints: list[bytes] = []
    for backend in (LocalBackend(), FailsHalfWay()):
        folder = tmp_path / type(backend).__name__
        folder.mkdir()
        run = Run(folder, backend)
        for name in "ab":
            await run.finish_group(name)
            await run.trained(name)
        assert not run.dropped_groups
        assert run.saved_steps[0] == 2
        (weights,) = folder.rglob("step-*2/theta.json")
        checkpoints.append(weights.read_bytes())
        await run.stop()
    assert backend.steps == [1, 2, 2] and backend.num_launched == 2
    assert checkpoints[0] == checkpoints[1]


@pytest.mark.parametrize("rewards", [(1.0, 0.0), (1.7e308, -1.7e308)])
async def test_groups_that_fail_every_step_are_dropped_and_the_next_are_trained(
    tmp_path: Path, rewards: tuple[float, float]
) -> None:
    run = start(tmp_path)
    run.backend.plan("step", *[ActionFailed("no")] * (3 if rewards[0] == 1 else 0))
    await run.finish_group("bad", *rewards)
    await run.until(lambda: run.dropped_groups == {"bad": "step_failed"})
    await run.finish_group("good")
    await run.trained("good")
    assert run.backend.num_launched == 1
    await run.stop()


async def test_a_stop_waits_for_the_running_step_and_saves_it(tmp_path: Path) -> None:
    run = start(tmp_path, JOB.model_copy(update={"save_freq": 100}))
    run.backend.may_step.clear()
    await run.finish_group("a")
    await run.backend.step_begun.wait()
    stopping = asyncio.create_task(run.stop())
    await asyncio.sleep(0)
    run.backend.may_step.set()
    await stopping
    restarted = start(tmp_path)
    assert (restarted.trained_groups, restarted.saved_steps) == ({"a": 1}, [1])
    await restarted.stop()


async def test_a_step_that_does_not_end_in_time_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "STEP_GRACE_S", 0.01)
    run = start(tmp_path, JOB.model_copy(update={"save_freq": 100}))
    await run.finish_group("a")
    await run.trained("a")
    run.backend.may_step.clear()
    run.backend.step_begun.clear()
    await run.finish_group("b")
    await run.backend.step_begun.wait()
    await run.stop()
    assert run.folders.is_empty


async def test_a_stop_never_raises(tmp_path: Path) -> None:
    run = start(tmp_path, JOB.model_copy(update={"save_freq": 100}))
    await run.finish_group("a")
    await run.trained("a")
    run.backend.plan("save", OSError("disk full"))
    run.backend.plan("close", OSError("no such process"))
    await run.stop()
    assert run.task.done()


async def test_idle_episodes_expire_while_groups_keep_arriving(tmp_path: Path) -> None:
    run = start(tmp_path, JOB.model_copy(update={"batch_size": 100}))
    await run.rolling()
    run.episodes.claim("me", "train", 1.0, now=-1e9)

    def is_swept() -> bool:
        run.loop.notify()  # keep the loop from waiting for its sweep interval
        return run.episodes.num_claimed == 0

    await run.until(is_swept)
    await run.stop()


async def test_not_every_change_causes_a_sweep_of_all_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SWEEP_EVERY_S", 1000.0)
    run = start(tmp_path, JOB.model_copy(update={"batch_size": 100}))
    await run.rolling()
    run.episodes.claim("me", "train", 1.0, now=-1e9)
    run.pool.dropped["g"] = "odd"
    run.loop.notify()
    await run.until(lambda: "g" in run.dropped_groups)  # the loop has checked the pool
    assert run.episodes.num_claimed == 1
    await run.stop()


async def test_the_previous_checkpoint_is_restored_if_the_newest_cannot_be_read(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    for name in "ab":
        await run.finish_group(name)
        await run.trained(name)
    await run.stop()
    restarted = start(tmp_path)
    restarted.backend.plan("restore", ActionFailed("torn"))
    await restarted.rolling()
    await restarted.trained("b")
    assert (restarted.trained_groups, restarted.dropped_groups) == ({"a": 1, "b": 2}, {})
    assert restarted.backend.steps == [2]
    await restarted.stop()


async def test_a_group_that_the_pool_drops_is_logged_without_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(tmp_path)
    await run.rolling()
    await run.capture("lost", call())
    monkeypatch.setattr(open_groups, "MAX_OPEN_S", -1e9)
    run.loop.notify()
    await run.until(lambda: run.dropped_groups == {"lost": "never_ended"})
    assert run.log.entries_after(0)[-1].reasons == {"lost": "never_ended"}
    await run.stop()
