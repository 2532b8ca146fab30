"""The runs in one run directory of a server. The module knows which run is current, and in which
folder a job's run is.

The file `current_run` names the folder of the current run. A restarted server continues this run. A
run directory without this file has only one run, whose folder is the run directory itself.
"""

from __future__ import annotations

import logging
from pathlib import Path

from fakevllm_adapters.job.model import TrainJob
from fakevllm_runtime.errors import ConfigError
from fakevllm_server.episodes.job_identity import parse_identity
from fakevllm_server.journal import reads
from fakevllm_server.journal.external_reader import read_journal_file
from fakevllm_server.journal.store import JOB, JOB_IDENTITY
from fakevllm_server.run.folder import write_atomically
from fakevllm_server.run.metadata import experiment_of, has_starts, read_metadata
from fakevllm_server.run.model_identity import ModelIdentity, read_recorded_model
from fakevllm_server.run.run_choice import TOP, ChosenRun, TopRun, choose_run, is_run_folder

log = logging.getLogger("fakevllm.server")


class RunDirectory:
    """The run directory of one server, which contains the folders of all its runs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def current(self) -> str:
        """Folder of the current run, relative to the run directory.

        If the file `current_run` names a folder that was deleted, the run directory itself is the
        folder of the current run.
        """
        try:
            recorded = (self._path / "current_run").read_text().strip()
        except (OSError, UnicodeDecodeError):
            return TOP
        if is_run_folder(recorded) and self.folder(recorded).is_dir():
            return recorded
        log.warning("the folder of the latest run, %s, does not exist any more", recorded)
        return TOP

    def make_current(self, relative: str) -> None:
        """Record that the run in the folder `relative` is the current run. Raises OSError if the
        disk is full."""
        write_atomically(self._path / "current_run", f"{relative}\n")

    def folder(self, relative: str) -> Path:
        """Return the folder of a run. Raises ConfigError if a symbolic link leads out of the run
        directory."""
        folder = self._path / relative
        if not folder.resolve().is_relative_to(self._path.resolve()):
            raise ConfigError(
                f"{folder} is outside of the run directory: replace the symbolic link by a folder."
            )
        return folder

    def choose(self, job: TrainJob, model: ModelIdentity) -> ChosenRun:
        """Return the run to which a job belongs. `model` is the model that the engine loads for the
        job.

        Raises ConfigError if a symbolic link leads out of the run directory, or if a file of a run
        is damaged.
        """

        def trains_other_model(relative: str) -> bool:
            recorded = read_recorded_model(self.folder(relative))
            if recorded is None or recorded.fingerprint is None:
                return False
            return not recorded.is_same_model(model)

        top = self._top_run()
        return choose_run(job.experiment_name, model.fingerprint, top, trains_other_model)

    def _top_run(self) -> TopRun | None:
        """Return the run whose folder is the run directory itself. Return None if no engine was
        started for such a run.

        If `run.json` is missing or unreadable, the experiment name is read from the job in the
        journal. Raises ConfigError if the journal is damaged.
        """
        text = read_metadata(self._path)
        if has_starts(text):
            return TopRun(experiment_of(text))
        journal = self._path / "journal.sqlite"
        if not journal.is_file():
            return None
        try:
            return _run_of_journal(journal)
        except ValueError as error:
            raise ConfigError(f"The journal {journal} is damaged ({error}): repair it.") from None


def _run_of_journal(journal: Path) -> TopRun | None:
    """Return the run to which a journal (a run's SQLite file) belongs. Return None if no engine was
    started with the journal. Raises ConfigError or ValueError if the journal is damaged."""
    identity = read_journal_file(journal, reads.meta, JOB_IDENTITY)
    if identity is not None:
        return TopRun(parse_identity(identity).experiment_name)
    job_yaml = read_journal_file(journal, reads.meta, JOB)
    return None if job_yaml is None else TopRun(TrainJob.from_yaml(job_yaml).experiment_name)
