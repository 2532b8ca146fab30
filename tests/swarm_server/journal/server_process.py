"""A server process without HTTP: its run directory, its steps, and a trainer for tests.

The trainer's weights are the list of the calls that it was trained on.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sqlalchemy import Connection

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.episodes.job_identity import identity_of
from fakevllm_server.episodes.states import EngineLifecycle
from fakevllm_server.journal import reads
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.run.log import RunLog
from fakevllm_server.training.checkpointing import Checkpointer
from fakevllm_server.training.step import StepRunner
from fakevllm_server.training.submission_intake import Intake
from fakevllm_server.types.backend import Batch, Call, LossSpec, PolicyName, StepMetrics

# The entropy bonus has a gradient for every call, so that no group is left out of a batch.
JOB = TrainJob(num_repeat=2, batch_size=1, entropy_coeff=0.1, save_freq=2, max_staleness=1000)

EDIT = "edit:"
"""Prefix of the ids of users' edits."""
Trained = list[list[tuple[str, list[int]]]]
"""The group id and response ids of each call and each demonstration of a user's edit, for each step
in order."""


class RecordingTrainer:
    """A trainer that records the calls and edits that its weights were trained on."""

    def __init__(self) -> None:
        self.weights: Trained = []
        self.before_step: Callable[[], object] = lambda: None
        self.after_step: Callable[[], object] = lambda: None

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        self.before_step()
        edits = [one for one in batch.demonstrations if one.group_id.startswith(EDIT)]
        trained = [*batch.calls, *edits]
        self.weights.append([(one.group_id, list(one.response_ids)) for one in trained])
        self.after_step()
        return {"loss": 0.0}

    async def save(self, folder: Path) -> None:
        (folder / "weights.json").write_text(json.dumps(self.weights))

    async def restore(self, folder: Path) -> None:
        saved = json.loads((folder / "weights.json").read_text())
        self.weights = [[(name, ids) for name, ids in step] for step in saved]

    async def boot(self, job: TrainJob) -> None:
        self.weights = []

    async def log_probs(self, calls: Sequence[Call], policy: PolicyName) -> list[list[float]]:
        return []

    async def launch(self) -> object:
        return None

    async def export(self, folder: Path) -> None: ...
    async def export_adapters(self, folder: Path, policy: PolicyName) -> None: ...
    async def close(self) -> None: ...

    async def health(self) -> bool:
        return True

    async def lost(self) -> str:
        return ""


class ServerProcess:
    """The parts of a server that use the run directory, driven without a training loop."""

    def __init__(self, folder: Path, job: TrainJob = JOB, keep_calls_s: float = 0.0) -> None:
        self.folder, self.job = folder, job
        folder.mkdir(exist_ok=True)
        self.journal = Journal(folder / "journal.sqlite")
        with self.journal.opening():
            self.engine = EngineLifecycle()
            self.log = RunLog(self.journal)
            self.intake = Intake(self.journal, self.log, self.engine)
            self.intake.resume(job, time.monotonic(), identity_of(job, None, None))
        self.trainer = RecordingTrainer()
        self.checkpointer = Checkpointer(
            self.trainer,
            CheckpointFolders(folder / "checkpoints"),
            self.journal,
            job.save_freq,
            keep_calls_s=keep_calls_s,
        )
        self.steps = self._new_steps()

    async def boot_trainer(self) -> None:
        """Restore the newest checkpoint, as the training loop does with a new trainer."""
        await self.trainer.boot(self.job)
        self.steps = self._new_steps()
        saved = await self.checkpointer.restore()
        step = 0 if saved is None else saved.step
        known = max(self.log.version, self.engine.version)
        version = known + 1 if known or step else 0
        batches = await self.log.record_rollback(step, version)
        await self._publish(version)
        self.engine.global_step = step + 1
        self.steps.resume(batches)

    async def step(self) -> bool:
        """Make a step if one is due, as the training loop does; return whether one was made."""
        if not self.steps.is_due(time.monotonic()):
            return False
        version = await self.steps.run()
        if version is not None:
            await self._publish(version)
            self.engine.global_step = self.log.last_step + 1
        return version is not None

    def record_drops(self) -> None:
        """Record the groups that the pool has dropped, as the training loop does."""
        self.log.record_drops(self.engine.global_step, self.intake.pool.take_dropped())

    def waiting(self) -> reads.PendingWork:
        """Return the pending work that a restarted process would read now."""
        assert self.journal.drain()
        return self.journal.read(reads.pending_work, 0.0)

    def content(self) -> list[str]:
        """Return all rows of the journal as text."""
        assert self.journal.drain()
        return self.journal.read(_content)

    def restarted(self, job: TrainJob | None = None) -> ServerProcess:
        """Close this process, and return the next process on the same files."""
        self.close()
        return ServerProcess(self.folder, job or self.job)

    def restarted_after_kill(self, into: Path) -> ServerProcess:
        """Return the next process on the files that `kill -9` would leave now, copied to `into`.

        No change may be waiting to be written.
        """
        shutil.copytree(self.folder, into)
        self.close()
        return ServerProcess(into, self.job)

    def close(self) -> None:
        self.journal.close()

    def _new_steps(self) -> StepRunner:
        return StepRunner(
            self.job,
            self.engine,
            self.intake.pool,
            self.trainer,
            self.log,
            self.checkpointer,
            job_hash=self.intake.job_hash,
        )

    async def _publish(self, version: int) -> None:
        self.engine.version = version
        if version:
            await self.log.record_publication(version, self.log.last_step)


def _content(db: Connection) -> list[str]:
    names = db.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'").scalars()
    return [
        f"{name} {tuple(row)}"
        for name in sorted(names)
        for row in db.exec_driver_sql(f"SELECT rowid, * FROM {name} ORDER BY rowid")
    ]
