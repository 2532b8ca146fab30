"""V10: only weights of completed and logged steps are served.

Weights from the middle of a step, or of a failed step, are never served.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_server.local_engines import LocalRollout, LocalTrainer
from swarm_server.loops import JOB, Run

from fakevllm_server.backends.fake.engine import START_THETA, FakeEngine
from fakevllm_server.backends.process.rollout_trainer_pairs import TwoProcesses
from fakevllm_server.backends.training.mismatch_limit import NO_UPDATE, TOO_FAR
from fakevllm_server.training import loop, stop_and_restart
from fakevllm_server.training import step as steps
from fakevllm_server.types.backend import (
    ActionFailed,
    BackendError,
    Batch,
    LossSpec,
    StepMetrics,
)

LONG_JOB = JOB.model_copy(update={"max_staleness": 1000, "save_freq": 2, "max_mismatch_k3": 1.0})
PARTIAL_WEIGHTS = 666.0
"""Weights that no completed step has produced."""
FATES = (
    "succeeds",
    "is refused",
    "is not finite",
    "is too far",
    "fails half way",
    "dies half way",
    "dies when it is done",
    "cannot be saved",
    "cannot be exported",
    "is exported half",
    "cannot be loaded",
)


class FailingTrainer(LocalTrainer):
    """A trainer whose steps end with the given fates."""

    def __init__(self, fates: list[str], rollout: CheckingRollout) -> None:
        super().__init__()
        self.fates = fates
        self.rollout = rollout
        self.known_weights = {START_THETA}
        """Weights of completed steps, which are or will be in the log."""
        self.breaks_export = False

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        fate = self.fates.pop(0) if self.fates else "succeeds"
        engine = self._engine_for("step")
        match fate:
            case "is refused":
                raise ActionFailed("no")
            case "is not finite":
                return {"loss": math.nan, "theta": theta_of(engine), **NO_UPDATE}
            case "is too far":
                return {"mismatch_k3": 5.0, "theta": theta_of(engine), **TOO_FAR}
            case "fails half way" | "dies half way":
                engine._theta = PARTIAL_WEIGHTS  # pyright: ignore[reportPrivateUsage]
                if fate == "dies half way":
                    self.die("killed")
                raise BackendError("step: PartialStep")
            case _:
                return await self._whole(batch, loss, fate)

    async def _whole(self, batch: Batch, loss: LossSpec, fate: str) -> StepMetrics:
        metrics = await super().step(batch, loss)
        self.known_weights.add(metrics["theta"])
        match fate:
            case "dies when it is done":
                self.die("killed")
            case "cannot be saved":
                self.plan("save", OSError("disk full"))
            case "cannot be exported":
                self.plan("export", ActionFailed("no room"))
            case "cannot be loaded":
                self.rollout.plan("load_weights", ActionFailed("no room"))
            case _:
                self.breaks_export = fate == "is exported half"
        return metrics

    async def export(self, folder: Path) -> None:
        await super().export(folder)
        if self.breaks_export:
            self.breaks_export = False
            (folder / "theta.json").write_bytes(orjson.dumps({"theta": PARTIAL_WEIGHTS}))
            raise BackendError("killed while it wrote")


class CheckingRollout(LocalRollout):
    def __init__(self) -> None:
        super().__init__()
        self.check: Callable[[float, int], None] = lambda theta, version: None

    async def load_weights(self, folder: Path, version: int) -> None:
        theta = orjson.loads((folder / "theta.json").read_bytes())["theta"]
        self.check(theta, version)
        await super().load_weights(folder, version)


def theta_of(engine: FakeEngine) -> float:
    return engine._theta  # pyright: ignore[reportPrivateUsage]


async def train_with_fates(fates: list[str], folder: Path) -> None:
    rollout = CheckingRollout()
    trainer = FailingTrainer(fates, rollout)
    run = Run(folder, TwoProcesses(rollout, trainer, folder / "weights"), LONG_JOB)
    wrong: list[str] = []

    def check(theta: float, version: int) -> None:
        """Check that the weights are of a completed step, and that the log has their version."""
        assert run.journal.drain()
        known = {
            one.version: one for one in run.log.entries_after(0) if one.kind in ("step", "restored")
        }
        entry = known.get(version)
        if theta not in trainer.known_weights:
            wrong.append(f"version {version} has weights {theta} of no step")
        if version and entry is None:
            wrong.append(f"version {version} is served and not in the log")
        elif entry is not None and entry.kind == "step" and entry.metrics["theta"] != theta:
            wrong.append(f"version {version} is {theta}, logged as {entry.metrics['theta']}")
        if run.engine.version > version:
            wrong.append(f"version {run.engine.version} was reported before it was served")

    rollout.check = check
    for name in ("a", "b", "c", "d"):
        await run.rolling()
        if run.loop.closed_reason is None:
            await run.pool_group(name)
            await run.until(lambda name=name: name in {*run.trained_groups, *run.dropped_groups})
    await run.rolling()
    assert not wrong, (wrong, fates)
    assert run.engine.version == rollout.loaded[-1] == max(rollout.loaded)
    await run.stop()


def run_with_fates(fates: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop_and_restart, "FIRST_S", 0.0)
        patch.setattr(steps, "RETRY_STEP_AFTER_S", 0.0)
        patch.setattr(loop, "SWEEP_EVERY_S", 0.01)
        asyncio.run(train_with_fates([*fates], Path(folder)))


@pytest.mark.parametrize("fate", FATES)
def test_weights_of_a_failed_step_are_not_served(fate: str) -> None:
    run_with_fates(["succeeds", fate, fate])


@settings(max_examples=15)
@given(st.lists(st.sampled_from(FATES), max_size=6))
def test_only_weights_of_completed_steps_are_served_after_any_failures(fates: list[str]) -> None:
    run_with_fates(fates)
