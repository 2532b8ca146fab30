"""V10: what is served is never a candidate that did not pass: weights half way through a step, of a
step that failed or that the log does not know."""

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
from fakevllm_server.backends.process.backend_pairs import TwoProcesses
from fakevllm_server.backends.training.mismatch_limit import NO_UPDATE, TOO_FAR
from fakevllm_server.training import guards, loop
from fakevllm_server.training import step as steps
from fakevllm_server.types.backend import (
    ActionFailed,
    BackendError,
    Batch,
    LossSpec,
    StepMetrics,
)

LONG_JOB = JOB.model_copy(update={"max_staleness": 1000, "save_freq": 2, "max_mismatch_k3": 1.0})
GARBLED = 666.0
"""Weights no whole step has ended with."""
FATES = (
    "well",
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


class Candidates(LocalTrainer):
    """A trainer whose steps end as they are told to."""

    def __init__(self, fates: list[str], rollout: Serving) -> None:
        super().__init__()
        self.fates = fates
        self.rollout = rollout
        self.passed = {START_THETA}
        """Weights that steps have ended with, and that are logged by now or about to be."""
        self.breaks_export = False

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        fate = self.fates.pop(0) if self.fates else "well"
        engine = self._engine_for("step")
        match fate:
            case "is refused":
                raise ActionFailed("no")
            case "is not finite":
                return {"loss": math.nan, "theta": theta_of(engine), **NO_UPDATE}
            case "is too far":
                return {"mismatch_k3": 5.0, "theta": theta_of(engine), **TOO_FAR}
            case "fails half way" | "dies half way":
                engine._theta = GARBLED  # pyright: ignore[reportPrivateUsage]
                if fate == "dies half way":
                    self.die("killed")
                raise BackendError("step: PartialStep")
            case _:
                return await self._whole(batch, loss, fate)

    async def _whole(self, batch: Batch, loss: LossSpec, fate: str) -> StepMetrics:
        metrics = await super().step(batch, loss)
        self.passed.add(metrics["theta"])
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
            (folder / "theta.json").write_bytes(orjson.dumps({"theta": GARBLED}))
            raise BackendError("killed while it wrote")


class Serving(LocalRollout):
    def __init__(self) -> None:
        super().__init__()
        self.check: Callable[[float, int], None] = lambda theta, version: None

    async def load_weights(self, folder: Path, version: int) -> None:
        theta = orjson.loads((folder / "theta.json").read_bytes())["theta"]
        self.check(theta, version)
        await super().load_weights(folder, version)


def theta_of(engine: FakeEngine) -> float:
    return engine._theta  # pyright: ignore[reportPrivateUsage]


async def play(fates: list[str], folder: Path) -> None:
    rollout = Serving()
    candidates = Candidates(fates, rollout)
    run = Run(folder, TwoProcesses(rollout, candidates, folder / "weights"), LONG_JOB)
    wrong: list[str] = []

    def check(theta: float, version: int) -> None:
        """Known to have passed, and in the log under its version before any call can carry it."""
        assert run.journal.drain()
        known = {
            one.version: one for one in run.log.entries_after(0) if one.kind in ("step", "restored")
        }
        entry = known.get(version)
        if theta not in candidates.passed:
            wrong.append(f"version {version} has weights {theta} of no step")
        if version and entry is None:
            wrong.append(f"version {version} is served and in no log")
        elif entry is not None and entry.kind == "step" and entry.metrics["theta"] != theta:
            wrong.append(f"version {version} is {theta}, logged as {entry.metrics['theta']}")
        if run.engine.version > version:
            wrong.append(f"version {run.engine.version} was told before it was served")

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


def played(fates: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "FIRST_S", 0.0)
        patch.setattr(steps, "RETRY_STEP_AFTER_S", 0.0)
        patch.setattr(loop, "SWEEP_EVERY_S", 0.01)
        asyncio.run(play([*fates], Path(folder)))


@pytest.mark.parametrize("fate", FATES)
def test_a_candidate_that_does_not_pass_is_not_served(fate: str) -> None:
    played(["well", fate, fate])


@settings(max_examples=15)
@given(st.lists(st.sampled_from(FATES), max_size=6))
def test_whatever_becomes_of_steps_only_what_passed_is_served(fates: list[str]) -> None:
    played(fates)
