"""After each publish, the rollout engine is asked for a known prompt, which shows stale weights."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_server.local_engines import LocalTrainer, StaleRollout
from swarm_server.loops import JOB, Run
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.backends.process.rollout_trainer_pairs import TwoProcesses
from fakevllm_server.journal import reads
from fakevllm_server.training import loop, stop_and_restart, weight_probe
from fakevllm_server.training.weight_probe import UNIT_ROUNDOFF, compare, limit_of
from fakevllm_server.types.backend import ActionFailed, Call, PolicyName
from fakevllm_server.types.known_prompt import ProbeReply
from fakevllm_server.types.number_arrays import FloatArray, float_array

LOG_PROBS = st.lists(st.floats(-50, 0), min_size=1, max_size=40)
DTYPES = st.sampled_from(sorted(UNIT_ROUNDOFF))


class ProbedRun(Run[TwoProcesses]):
    def __init__(self, folder: Path, job: TrainJob = JOB) -> None:
        self.rollout, self.trainer = StaleRollout(), LocalTrainer()
        weights = folder / "weights"
        super().__init__(folder, TwoProcesses(self.rollout, self.trainer, weights), job)

    async def capture_version(self, name: str, version: int) -> None:
        await self.capture(name, call(version), call(version))

    async def train(self, name: str) -> None:
        await self.finish_group(name)
        await self.trained(name)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_and_restart, "FIRST_S", 0.0)
    monkeypatch.setattr(loop, "SWEEP_EVERY_S", 0.01)
    monkeypatch.setattr(loop, "STEP_GRACE_S", 0.01)


def reply(log_probs: Sequence[float], dtype: str = "float32", num_layers: int = 4) -> ProbeReply:
    return ProbeReply([0] * (len(log_probs) + 1), log_probs, dtype, num_layers)


@given(LOG_PROBS, DTYPES, st.integers(0, 200))
def test_equal_log_probabilities_are_never_a_problem(
    log_probs: list[float], dtype: str, num_layers: int
) -> None:
    result = compare(reply(log_probs, dtype, num_layers), log_probs)
    assert result is not None and result.is_same


@given(LOG_PROBS, DTYPES, st.integers(1, 200), st.data())
def test_rounding_of_each_log_probability_is_never_a_problem(
    log_probs: list[float], dtype: str, num_layers: int, data: st.DataObject
) -> None:
    limit = limit_of(dtype, num_layers)
    noise = st.lists(st.floats(-limit, limit), min_size=len(log_probs), max_size=len(log_probs))
    off = [one + other for one, other in zip(log_probs, data.draw(noise), strict=True)]
    result = compare(reply(off, dtype, num_layers), log_probs)
    assert result is not None and result.difference <= limit * (1 + 1e-9) + 1e-12


@given(LOG_PROBS, DTYPES, st.integers(1, 200))
def test_a_difference_above_the_limit_is_a_problem(
    log_probs: list[float], dtype: str, num_layers: int
) -> None:
    off = [one - 1.1 * limit_of(dtype, num_layers) for one in log_probs]
    result = compare(reply(off, dtype, num_layers), log_probs)
    assert result is not None and not result.is_same


def test_a_coarser_type_and_a_deeper_model_have_a_higher_limit() -> None:
    limits = [limit_of(dtype, 28) for dtype in ("float64", "float32", "float16", "bfloat16")]
    assert limits == sorted(limits)
    assert limit_of("bfloat16", 4) < limit_of("bfloat16", 64) < math.log(10)


def test_what_is_not_a_number_is_a_problem_of_the_engine_and_not_of_the_trainer() -> None:
    result = compare(reply([math.nan, -1.0]), [-1.0, -1.0])
    assert result is not None and not result.is_same
    assert compare(reply([-1.0, -1.0]), [math.nan, -1.0]) is None
    assert compare(reply([-1.0]), [-1.0, -1.0]) is None
    assert compare(reply([]), []) is None


async def test_stale_weights_are_loaded_again_as_the_next_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = ProbedRun(tmp_path)
    await run.train("a")
    run.rollout.is_stale.append(True)
    await run.train("b")
    assert run.rollout.loaded == [0, 1, 2, 3]
    assert (run.engine.version, run.log.version) == (3, 3)
    assert (run.rollout.num_launched, run.engine.detail) == (1, None)
    assert "the weights of version 2 are loaded once more" in caplog.text
    await run.train("c")
    assert run.rollout.loaded == [0, 1, 2, 3, 4]
    await run.stop()


async def test_no_answer_of_stale_weights_is_trained(tmp_path: Path) -> None:
    run = ProbedRun(tmp_path)
    await run.train("a")
    await run.capture_version("before", 2)
    await run.capture("mixed", call(1), call(2))
    run.rollout.is_stale.append(True)
    await run.train("b")
    await run.capture_version("after", 2)
    for name in ("before", "mixed", "after"):
        ended = await run.end_group(name, 1.0, 0.0)
        assert (ended.pooled, ended.failure_reason) == (False, "unverified_weights")
    await run.stop()
    again = ProbedRun(tmp_path)
    await again.rolling()
    await again.capture_version("late", 2)
    assert (await again.end_group("late", 1.0, 0.0)).failure_reason == "unverified_weights"
    await again.capture_version("fresh", 3)
    assert (await again.end_group("fresh", 1.0, 0.0)).pooled
    await again.stop()


async def test_groups_that_wait_already_are_dropped_with_the_reason(tmp_path: Path) -> None:
    run = ProbedRun(tmp_path)
    await run.train("a")
    run.trainer.may_step.clear()
    run.trainer.step_begun.clear()
    await run.pool_group("b")
    await run.trainer.step_begun.wait()
    await run.capture_version("waits", 2)
    assert (await run.end_group("waits", 1.0, 0.0)).pooled
    run.rollout.is_stale.append(True)
    run.trainer.may_step.set()
    await run.until(lambda: run.dropped_groups == {"waits": "unverified_weights"})
    await run.stop()


async def test_an_engine_that_stays_stale_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = ProbedRun(tmp_path)
    await run.train("a")
    run.rollout.is_stale.extend([True, True])
    await run.finish_group("b")
    await run.until(lambda: run.rollout.num_launched == 2)
    await run.trained("b")
    assert run.rollout.loaded == [0, 1, 2, 3, 4]
    assert (run.trainer.num_launched, run.trainer.steps) == (1, [1, 2]), "the trainer goes on"
    assert "the rollout engine has other weights than the trainer" in caplog.text
    for version in (2, 3):
        await run.capture_version(f"of {version}", version)
        assert not (await run.end_group(f"of {version}", 1.0, 0.0)).pooled
    await run.train("c")
    assert run.engine.version == 5
    await run.stop()


async def test_if_a_new_engine_is_stale_too_apps_are_served_and_nothing_is_trained(
    tmp_path: Path,
) -> None:
    run = ProbedRun(tmp_path)
    await run.train("a")
    run.rollout.keeps_all_stale = True
    await run.finish_group("b")
    await run.until(lambda: "also after a restart" in (run.engine.detail or ""))
    await run.rolling()
    assert run.rollout.num_launched == 2
    await run.capture("c", call(), call())
    assert (await run.end_group("c", 1.0, 0.0)).failure_reason == "training_refused"
    assert run.engine.status is EngineStatus.ROLLING
    await run.stop()


async def test_an_engine_that_cannot_answer_is_left_alone_and_this_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = ProbedRun(tmp_path)
    run.rollout.answers = False
    run.rollout.keeps_all_stale = True
    for name in "abc":
        await run.train(name)
    assert run.rollout.loaded == [0, 1, 2, 3]
    assert caplog.text.count("cannot be asked for a known prompt") == 1
    await run.stop()


async def test_a_trainer_that_cannot_answer_does_not_stop_training(tmp_path: Path) -> None:
    run = ProbedRun(tmp_path)
    run.trainer.plan("log_probs", ActionFailed("not supported"))
    for name in "ab":
        await run.train(name)
    assert run.rollout.loaded == [0, 1, 2]
    await run.stop()


async def test_engines_that_never_agreed_are_not_restarted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = ProbedRun(tmp_path)
    run.rollout.keeps_all_stale = True
    for name in "ab":
        await run.train(name)
    assert (run.rollout.loaded, run.rollout.num_launched) == ([0, 1, 2], 1)
    assert "already at the first answer" in caplog.text
    await run.stop()


async def test_a_healthy_engine_is_asked_after_each_publish_and_keeps_its_versions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "fakevllm.server")
    run = ProbedRun(tmp_path)
    for name in "abc":
        await run.train(name)
    assert run.rollout.loaded == [0, 1, 2, 3]
    assert caplog.text.count("differ from the trainer's by 0 nats") == 4
    assert run.journal.read(reads.meta, "distrusted_versions") is None
    await run.stop()


async def test_a_trainer_whose_numbers_are_not_finite_once_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = ProbedRun(tmp_path)
    await run.train("a")
    answered = run.trainer.log_probs

    async def not_finite(calls: Sequence[Call], policy: PolicyName) -> list[FloatArray]:
        monkeypatch.setattr(run.trainer, "log_probs", answered)
        return [float_array([math.nan] * len(row)) for row in await answered(calls, policy)]

    monkeypatch.setattr(run.trainer, "log_probs", not_finite)
    await run.train("b")
    assert "version 2: the trainer's log-probabilities of a known prompt are not" in caplog.text
    run.rollout.is_stale.append(True)
    await run.train("c")
    assert run.rollout.loaded == [0, 1, 2, 3, 4], "the stale load of version 3 was found"
    await run.stop()


async def test_a_probe_that_hangs_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_probe, "PROBE_WITHIN_S", 0.01)
    run = ProbedRun(tmp_path)
    run.rollout.probe = asyncio.Event().wait  # pyright: ignore[reportAttributeAccessIssue]
    for name in "ab":
        await run.train(name)
    assert caplog.text.count("no answer came within 0.01 s") == 1
    await run.stop()
