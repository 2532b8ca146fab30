"""One run that the server has open, with its parts. The parts include the run's folder, the journal
(SQLite file), the run log, the checkpoints and the learning curves. Another part is the intake,
which accepts calls, groups and episodes."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.config.model import ConfigError, ServerConfig
from fakevllm_server.curves.run_follower import Follower
from fakevllm_server.curves.sample_reader import SampleRules
from fakevllm_server.curves.tracker_process import ProcessFollower
from fakevllm_server.curves.trackers import TRACKERS
from fakevllm_server.episodes.job_identity import (
    JobIdentity,
    changed_settings,
    identity_of,
    parse_identity,
)
from fakevllm_server.episodes.states import EngineLifecycle
from fakevllm_server.journal import reads, row_changes
from fakevllm_server.journal.store import JOB, JOB_IDENTITY, Journal
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.run.folder import RunFolder
from fakevllm_server.run.log import RunLog
from fakevllm_server.run.releases import Releases
from fakevllm_server.run.run_choice import TOP
from fakevllm_server.training.submission_intake import Intake

_ENGINE_RUNS = "engine_runs"
"""Key in the journal's table `meta`. The key exists from an engine's start until the engine is
stopped."""


class OpenRun:
    """The parts of the server that belong to one run. Call `close` when another run is opened or
    the server ends."""

    def __init__(self, relative: str, folder: RunFolder, engine: EngineLifecycle) -> None:
        """Open a run, and restore the groups and episodes that wait in its journal to be trained.
        The engine must be offline.

        Raises ConfigError if the folder or the journal cannot be used. The folder is unlocked in
        this case.
        """
        self.relative = relative
        """Path of the run's folder, relative to the server's run directory."""
        self.folder = folder
        self._curves: list[Follower | ProcessFollower] = []
        with ExitStack() as on_error:
            on_error.callback(self._release)
            try:
                self.checkpoints = CheckpointFolders(self.path / "checkpoints")
                self.run_id = folder.run_id()
                self.journal = Journal(self.path / "journal.sqlite")
                on_error.callback(self.journal.close)
                with self.journal.opening():
                    self._read_journal(engine)
            except (OSError, ValueError) as error:
                cause = getattr(error, "strerror", None) or error
                raise ConfigError(
                    f"The run in {self.path} cannot be opened ({cause}): free disk space, repair "
                    "the file, or choose another --run-dir."
                ) from error
            on_error.pop_all()

    @property
    def path(self) -> Path:
        return self.folder.path

    def _read_journal(self, engine: EngineLifecycle) -> None:
        self.runlog = RunLog(self.journal)
        if not (self.runlog.version or self.checkpoints.is_empty):
            # The run would start from its first step, and delete these checkpoints.
            raise ValueError("it has no trained steps, but the run directory has checkpoints")
        job_yaml = self.journal.read(reads.meta, JOB)
        self.job = None if job_yaml is None else TrainJob.from_yaml(job_yaml)
        """Job with which the run's engine was started last; None before the first start."""
        self.releases = Releases(self.journal, self.runlog)
        self.intake = Intake(self.journal, self.runlog, engine, self.releases.rejected)
        self.intake.resume(self.job, time.monotonic(), self._read_identity())

    def _read_identity(self) -> JobIdentity | None:
        text = self.journal.read(reads.meta, JOB_IDENTITY)
        return None if text is None else parse_identity(text)

    def changed_settings(self, identity: JobIdentity) -> list[str]:
        """Return the names of the settings in which a new job differs from the previous job. The
        previous job is the one with which the run's engine was last started. Only the settings that
        identify a job are compared. `identity` contains these settings of the new job. Call this
        method only when no change of the journal is queued.

        The journal of an older server does not contain the identity of its job. In this case, the
        previous job is assumed to have the model and the experiment name of the new job.
        """
        previous = self._read_identity()
        job_yaml = self.journal.read(reads.meta, JOB)
        if job_yaml is None:
            return []
        if previous is None:
            job = TrainJob.from_yaml(job_yaml)
            previous = identity_of(job, identity.model, identity.experiment_name)
        return changed_settings(previous, identity)

    def record_start(self, job: TrainJob, identity: JobIdentity) -> None:
        """Record in the journal that an engine is started with `job`. The change is queued, and may
        not be on disk yet."""
        self.job = job
        self.journal.put(
            row_changes.meta_set(JOB, job.as_yaml()),
            row_changes.meta_set(JOB_IDENTITY, identity.to_json()),
            row_changes.meta_set(_ENGINE_RUNS, "yes"),
        )

    def record_stop(self) -> None:
        """Record in the journal that no engine runs. The change is queued, and may not be on disk
        yet."""
        self.journal.put(row_changes.meta_set(_ENGINE_RUNS, None))

    @property
    def engine_runs(self) -> bool:
        """True if, according to the journal, an engine was started and not stopped."""
        return self.journal.read(reads.meta, _ENGINE_RUNS) is not None

    def follow_curves(self, config: ServerConfig) -> None:
        """Write the run's curves to the server's trackers from now on, until `close`.

        With tables of samples, each tracker has a process of its own, because reading a tokenizer
        would hold the interpreter's lock (GIL) for tenths of a second.
        """
        has_tables = config.samples.num_groups > 0
        samples = SampleRules(config.samples, config.privacy) if has_tables else None
        for name in config.trackers:
            kind = TRACKERS[name]
            follower = (
                ProcessFollower(self.path, name, samples=samples)
                if kind.has_own_process or has_tables
                else Follower(self.path, kind)
            )
            follower.start()
            self._curves.append(follower)

    async def close(self) -> None:
        """Write the queued changes of the journal, and the last points of the curves. Then unlock
        the run's folder."""
        await asyncio.to_thread(self.journal.close)
        await asyncio.gather(*(asyncio.to_thread(one.close) for one in self._curves))
        self._release()

    def _release(self) -> None:
        """Unlock the run's folder. If this folder is the server's run directory itself, keep the
        lock, because the run directory stays locked until the server ends."""
        if self.relative != TOP:
            self.folder.close()
