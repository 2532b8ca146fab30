"""One run that the server has open, with its folder, journal, run log, checkpoints, intake and
curves."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.config.model import ConfigError
from fakevllm_server.curves.run_follower import Follower
from fakevllm_server.episodes.states import EngineLifecycle
from fakevllm_server.journal import reads
from fakevllm_server.journal.store import JOB, Journal
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.run.folder import RunFolder
from fakevllm_server.run.log import RunLog
from fakevllm_server.run.run_choice import TOP
from fakevllm_server.training.submission_intake import Intake


class OpenRun:
    """The parts of the server that belong to one run. Call `close` when another run is opened or
    the server ends."""

    def __init__(self, relative: str, folder: RunFolder, engine: EngineLifecycle) -> None:
        """Open a run with what waits in its journal. The engine, which must be offline, gets the
        step of the run.

        Raises ConfigError if the folder or the journal cannot be used. The folder is then released.
        """
        self.relative = relative
        """Path of the run's folder, relative to the server's run directory."""
        self.folder = folder
        self._curves: Follower | None = None
        try:
            self.checkpoints = CheckpointFolders(self.path / "checkpoints")
            self.journal = Journal(self.path / "journal.sqlite")
            self.run_id = folder.run_id()
            with self.journal.opening():
                self._read_journal(engine)
        except ConfigError:
            self._release()
            raise

    @property
    def path(self) -> Path:
        return self.folder.path

    def _read_journal(self, engine: EngineLifecycle) -> None:
        self.runlog = RunLog(self.journal)
        engine.global_step = self.runlog.last_step + 1
        if not (self.runlog.version or self.checkpoints.is_empty):
            # A run that starts from the beginning would delete these checkpoints.
            raise ValueError("it has no trained steps, but the run directory has checkpoints")
        job_yaml = self.journal.read(reads.meta, JOB)
        self.job = None if job_yaml is None else TrainJob.from_yaml(job_yaml)
        """Job with which the run's engine was started last; None before the first start."""
        self.intake = Intake(self.journal, self.runlog, engine)
        self.intake.resume(self.job, time.monotonic())

    def follow_curves(self) -> None:
        """Write the run's curves from now on, until `close`."""
        self._curves = Follower(self.path)
        self._curves.start()

    async def close(self) -> None:
        """Write what waits in the journal's queue and the last curves, and release the folder."""
        await asyncio.to_thread(self.journal.close)
        if self._curves is not None:
            await asyncio.to_thread(self._curves.close)
        self._release()

    def _release(self) -> None:
        """Release the lock of the folder. The lock of the run directory itself, which is also that
        of the run at the top, is kept until the server ends."""
        if self.relative != TOP:
            self.folder.close()
