"""Reads, exports and restores the checkpoints of a run, without the server.

Reading and exporting take no lock and change no checkpoint, so they are safe while a server uses
the run. A restore needs the lock of the run directory.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from fakevllm_runtime.errors import ConfigError
from fakevllm_server.backends.verl.trainer_arguments import arguments_for_checkpoint
from fakevllm_server.journal import reads
from fakevllm_server.journal.external_reader import read_journal_file
from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.checkpoints import CheckpointFolders, digest
from fakevllm_server.run.folder import RunFolder, RunInUse
from fakevllm_server.run.log import RunLog
from fakevllm_server.run.model_identity import identify, read_recorded_model
from fakevllm_server.run.release_history import ReleaseState
from fakevllm_server.run.releases import read_state
from fakevllm_server.training.checkpointing import best_checkpoint
from fakevllm_server.types.drop_reasons import DropReason
from fakevllm_server.types.engine_spec import EngineSpec

P = ParamSpec("P")
T = TypeVar("T")
OnRead = Callable[[int], object]
"""Function that is called with the size of each chunk that was read, in bytes."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint that is recorded in the journal."""

    saved: SavedCheckpoint
    at: float
    """Time at which the checkpoint was saved, in Unix seconds."""
    is_published: bool
    """Whether the weights of the checkpoint were ever served."""

    @property
    def step(self) -> int:
        return self.saved.step


class Integrity(StrEnum):
    """Result of comparing a checkpoint's files with the digest that was recorded when the files
    were written."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    MISSING = "missing"
    REPLACED = "replaced"
    """The checkpoint was deleted during the check, because a running server has newer
    checkpoints."""


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    """The result of verifying a checkpoint."""

    integrity: Integrity
    detail: str = ""
    """How the checkpoint is damaged; empty if it is not damaged."""

    def __str__(self) -> str:
        return f"{self.integrity} ({self.detail})" if self.detail else self.integrity


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The initial model of a run: the model as it was before any training."""

    trainer: str
    """Name of the trainer."""
    model: str
    """Model folder or hub name."""
    allow_hub: bool = False


class RunArchive:
    """Read access to the checkpoints of a run."""

    def __init__(self, run_dir: Path) -> None:
        """Open the run in a folder. Raises ConfigError if the folder has no run."""
        self.run_dir = run_dir
        self._journal = run_dir / "journal.sqlite"
        if not self._journal.is_file():
            raise ConfigError(
                f"{run_dir} has no run: set --run-dir to the run directory of a server."
            )

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return all checkpoints of the run, newest first."""
        return self._read(_read_checkpoints)

    def checkpoint(self, step: int) -> CheckpointInfo:
        """Return the checkpoint of a step. Raises ConfigError if this step has no checkpoint."""
        known = self.checkpoints()
        for checkpoint in known:
            if checkpoint.step == step:
                return checkpoint
        steps = ", ".join(str(checkpoint.step) for checkpoint in reversed(known))
        hint = f"it has those of steps {steps}" if known else "it has no checkpoint yet"
        raise ConfigError(f"{self.run_dir} has no checkpoint of step {step}: {hint}.")

    def best(self) -> CheckpointInfo:
        """Return the best checkpoint, which is the checkpoint with the highest mean reward. Only
        the checkpoints since the latest change of the reward hooks or the job are compared.

        Raises ConfigError if there is no checkpoint.
        """
        known = self.checkpoints()
        changes = [step for step, _ in self.reward_changes()]
        best = best_checkpoint([checkpoint.saved for checkpoint in known], changes)
        if best is None:
            raise ConfigError(f"{self.run_dir} has no checkpoint yet.")
        return next(checkpoint for checkpoint in known if checkpoint.saved is best)

    def reward_changes(self) -> list[tuple[int, str]]:
        """Return a pair (step, text) for each step at which the reward hooks or the job changed.
        The text names the change."""
        return self._read(reads.reward_changes)

    def last_step(self) -> int:
        """Return the number of the last step that was trained. The newest checkpoint may be of an
        earlier step."""
        return self._read(reads.log_position).last_step

    def release_state(self) -> ReleaseState:
        """Return the run's state of releases: which versions of the weights are released, under
        evaluation, rejected or pinned (kept), and whether releases are on hold."""
        return self._read(read_state)

    def side_checkpoints(self) -> list[SavedCheckpoint]:
        """Return the side checkpoints. A side checkpoint belongs to a version that is no longer
        part of the training, because training went back to an earlier version."""
        return self._read(reads.side_checkpoints)

    def folder(self, checkpoint: CheckpointInfo) -> Path:
        """Return the path of a checkpoint's folder."""
        return self.run_dir / "checkpoints" / checkpoint.saved.folder

    def num_bytes(self, checkpoint: CheckpointInfo) -> int | None:
        """Return the size of a checkpoint's files, or None if its folder is missing."""
        folder = self.folder(checkpoint)
        if not folder.is_dir():
            return None
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def unknown_names(self) -> list[str]:
        """Return the names of entries in the folder `checkpoints` that the journal does not list.

        While a running server writes or deletes a checkpoint, the folder of this checkpoint may be
        among these names.
        """
        folder = self.run_dir / "checkpoints"
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        known = self._read(reads.checkpoint_folders)
        return [name for name in names if name not in known]

    def verify(self, checkpoint: CheckpointInfo, on_read: OnRead = int) -> IntegrityReport:
        """Read a checkpoint's files, and report whether they are intact, damaged or missing. A
        fourth result, `REPLACED`, means that a running server deleted the checkpoint during the
        check."""
        report = self._verify_files(checkpoint, on_read)
        if report.integrity is not Integrity.WHOLE and checkpoint not in self.checkpoints():
            return IntegrityReport(Integrity.REPLACED)
        return report

    def trained_model(self, moved_to: str | None, allow_hub: bool) -> TrainedModel:
        """Return the initial model of the run, with the name of the trainer.

        `moved_to` is the model's present folder or hub name. If `moved_to` is None, the model is
        expected at the place from which the run was started. Raises ConfigError if the model does
        not exist or differs from the run's model.
        """
        known = read_recorded_model(self.run_dir)
        if known is None:
            raise ConfigError(
                f"{self.run_dir} has no model.json, so its model is not known: start the server "
                "once with the run's model."
            )
        if known.trainer == "fake" or known.model is None:
            raise ConfigError(
                f"{self.run_dir} is a run of the fake engine: there is no model to export."
            )
        if moved_to is None and not (allow_hub or Path(known.model).is_dir()):
            raise ConfigError(
                f"The model folder of this run, {known.model}, does not exist any more: set "
                "--model to its new path."
            )
        from fakevllm_server.config.model import find_model  # imports the engines

        model = find_model(moved_to or known.model, allow_hub)
        if not known.is_same_model(identify(model)):
            raise ConfigError(
                f"{model} is not the model that this run trains. The run was started with "
                f"{known.model}: set --model to that model."
            )
        return TrainedModel(known.trainer, model, allow_hub)

    def _verify_files(self, checkpoint: CheckpointInfo, on_read: OnRead) -> IntegrityReport:
        folder = self.folder(checkpoint)
        if not folder.is_dir():
            return IntegrityReport(Integrity.MISSING)
        try:
            if digest(folder, on_read) == checkpoint.saved.digest:
                return IntegrityReport(Integrity.WHOLE)
        except OSError as error:
            return IntegrityReport(
                Integrity.DAMAGED, f"{error.filename} cannot be read: {error.strerror}"
            )
        return IntegrityReport(Integrity.DAMAGED, "its files are not those that were written")

    def _read(
        self, query: Callable[Concatenate[Connection, P], T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        return read_journal_file(self._journal, query, *arguments, **named)


class CheckpointRestore:
    """A planned restore. `apply` returns the run to one of its checkpoints, and discards all later
    training.

    The run directory is locked until `close` is called. Meanwhile, no server can start in it.
    """

    def __init__(self, run_dir: Path, step: int) -> None:
        """Plan a restore to the checkpoint of `step`, and lock the run directory.

        Raises ConfigError if the checkpoint does not exist or a server uses the run.
        """
        self.archive = RunArchive(run_dir)
        self.checkpoint = self.archive.checkpoint(step)
        try:
            self._lock = RunFolder(run_dir)
        except RunInUse:
            raise ConfigError(
                f"A server uses {run_dir}: stop it, then restore, then start it again."
            ) from None
        try:
            self._journal = Journal(run_dir / "journal.sqlite")
        except ConfigError:
            self._lock.close()
            raise
        self._folders = CheckpointFolders(run_dir / "checkpoints")
        self.newer = [
            checkpoint for checkpoint in self.archive.checkpoints() if checkpoint.step > step
        ]
        """Checkpoints of later steps. `apply` deletes them, except those of pinned versions."""
        self.last_step = self.archive.last_step()
        """The last step that was trained."""
        self.lost = self._journal.read(reads.groups_trained_after, step)
        """Ids of the groups that were trained after the checkpoint, and that `apply` discards."""

    @property
    def is_unnecessary(self) -> bool:
        """True if nothing was trained after the checkpoint, so that the restore would discard
        nothing."""
        return not (self.newer or self.lost or self.last_step > self.checkpoint.step)

    def apply(self) -> None:
        """Return the run to the checkpoint, and discard everything after the checkpoint.

        First the run's journal (a SQLite file) is changed, and then the folders of the discarded
        checkpoints are deleted. If the process dies in between, the server deletes these folders at
        its next start. Raises ConfigError if the journal cannot be written.
        """
        log = RunLog(self._journal)
        pinned = self.archive.release_state().pinned
        log.record_abandoned(
            self.checkpoint.step, log.version + 1, DropReason.GONE_BACK.value, pinned
        )
        if not self._journal.drain():
            raise ConfigError(
                f"The journal cannot be written ({self._journal.error or 'the disk is slow'}): "
                "fix the cause, then run the command again."
            )
        self._folders.delete_except(self._journal.read(reads.checkpoint_folders))

    def close(self) -> None:
        self._journal.close()
        self._lock.close()


async def export(
    archive: RunArchive, checkpoint: CheckpointInfo, trained: TrainedModel, to: Path, dtype: str
) -> None:
    """Export a checkpoint as a model folder to the path `to`. A separate trainer process does the
    export.

    The model folder gets its final name when it is complete. Raises BackendError if the trainer
    fails. Raises OSError if the disk fails. After an error, the trainer's log is in the file
    `export.log` in the run directory.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    checkpoint_folder = archive.folder(checkpoint)
    with (
        _temporary_folder(to.parent, f".{to.name}-") as temporary,
        _temporary_folder(None, "fakevllm-") as trainer_dir,
    ):
        spec = EngineSpec(
            trained.trainer,
            trainer_dir,  # the run directory may have the socket of a running server's trainer
            trained.model,
            "export",
            allow_hub=trained.allow_hub,
            extra_args=_export_arguments(trained.trainer, checkpoint_folder, dtype),
            train_only=True,
        )
        from fakevllm_server.backends.process.child_engine import ChildEngine  # imports aiohttp

        trainer = ChildEngine(spec)
        try:
            await trainer.launch()
            await trainer.restore(checkpoint_folder.resolve())
            await trainer.export(temporary / "model")
        except BaseException:
            with contextlib.suppress(OSError):
                shutil.copyfile(spec.log_file, archive.run_dir / "export.log")
            raise
        finally:
            await trainer.close()
        (temporary / "model").rename(to)


def _export_arguments(trainer: str, checkpoint: Path, dtype: str) -> list[str]:
    """Return the command-line arguments for a trainer process that only exports a checkpoint.

    The embedded trainer (the server's own torch trainer) exports on the CPU, because a running
    server may use the GPU.
    """
    if trainer != "verl":
        return ["--device=cpu", f"--dtype={dtype}"]
    return arguments_for_checkpoint(checkpoint)


def _read_checkpoints(db: Connection) -> list[CheckpointInfo]:
    """Return the checkpoints that are recorded in the journal, newest first."""
    query = (
        "SELECT step, folder, version, digest, reward_mean, at, EXISTS (SELECT 1 FROM "
        "publications p WHERE p.step = c.step AND p.version >= c.version) "
        "FROM checkpoints c ORDER BY step DESC"
    )
    rows: list[Any] = list(db.exec_driver_sql(query))
    return [CheckpointInfo(SavedCheckpoint(*row[:5]), row[5], bool(row[6])) for row in rows]


@contextlib.contextmanager
def _temporary_folder(parent: Path | None, prefix: str) -> Generator[Path]:
    """Create a temporary folder that exists while the `with` block runs. The folder is created in
    `parent`, or in the system's temporary folder if `parent` is None."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as name:
        yield Path(name).resolve()
