"""The trainers of the contract tests, each in its own process."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.process.child_engine import ChildEngine
from fakevllm_server.types.backend import Batch, Call, LossSpec, StepMetrics
from fakevllm_server.types.engine_spec import EngineSpec

JOB = TrainJob(lr=1e-3, max_mismatch_k3=None)
"""The job of the tests. It has no mismatch limit, because the tests' calls are not sampled."""
KINDS = [
    pytest.param("fake"),
    pytest.param("embedded"),
    pytest.param("verl", marks=pytest.mark.real),
]
FAKE_EXEMPTIONS = {
    "arithmetic": "its policy gradient is plain REINFORCE of one number, without clip or weights",
    "a model": "it has no model: it exports one number",
    "poison": "it does not check its input",
    "settings": "it has one loss, whatever its name",
    "weights of its own process": "a step ends before a test can query its health",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A trainer in its own process."""

    kind: str
    engine: ChildEngine
    folder: Path
    """The run directory."""

    def needs(self, feature: str) -> None:
        """Skip the test if this trainer is exempt from the feature."""
        if self.kind == "fake":
            pytest.skip(f"fake: {FAKE_EXEMPTIONS[feature]}")

    async def step(self, calls: list[Call], job: TrainJob = JOB) -> StepMetrics:
        return await self.engine.step(Batch(1, calls), LossSpec.of(job))

    async def export(self, name: str) -> Path:
        folder = self.folder / name
        await self.engine.export(folder)
        return folder


@asynccontextmanager
async def running(
    kind: str, folder: Path, *arguments: str, job: TrainJob = JOB
) -> AsyncGenerator[Subject]:
    """Run a trainer without a rollout engine, on the demo model."""
    folder.mkdir(parents=True, exist_ok=True)
    keeps = ["--keep-reference"] if kind == "verl" else []
    spec = EngineSpec(
        kind, folder, str(DEMO_MODEL_DIR), "demo", extra_args=[*arguments, *keeps], train_only=True
    )
    engine = ChildEngine(spec)
    try:
        await engine.launch()
        await engine.boot(job)
        yield Subject(kind, engine, folder)
    finally:
        await engine.close()


def process_of(subject: Subject) -> int:
    """Return the process id of the trainer, which is the leader of its session.

    The process is found by its run directory.
    """
    run_dir = str(subject.folder).encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            command = _command(int(entry.name))
            if b"-m" in command and b"--run-dir" in command and run_dir in command:
                return int(entry.name)
    raise AssertionError(f"no process runs in {subject.folder}")


def ray_workers(members: list[int]) -> list[int]:
    """Return the processes among `members` that hold a part of the model."""
    return [process for process in members if b"PolicyWorker" in b" ".join(_command(process))]


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def _command(process: int) -> list[bytes]:
    try:
        return (Path("/proc") / str(process) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
