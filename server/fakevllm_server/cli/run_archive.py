"""The checkpoints of one run, for whoever looks at them, goes back to one or takes one away.

Looking needs no lock and changes nothing: it may be done beside the server that writes.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from fakevllm_server.backends.process.child_engine import ChildEngine
from fakevllm_server.config.model import ConfigError, find_model
from fakevllm_server.journal import reads
from fakevllm_server.journal.offline import read_journal_file
from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.checkpoints import CheckpointFolders, digest
from fakevllm_server.run.folder import RunFolder, RunInUse, fingerprint
from fakevllm_server.run.log import RunLog
from fakevllm_server.training.checkpointing import best_checkpoint
from fakevllm_server.types.engine_spec import EngineSpec

P = ParamSpec("P")
T = TypeVar("T")
OnRead = Callable[[int], object]
"""Hears of each number of bytes that was read."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    saved: SavedCheckpoint
    at: float
    """Unix seconds."""
    is_published: bool
    """Whether its weights have been served."""

    @property
    def step(self) -> int:
        return self.saved.step


class Integrity(StrEnum):
    WHOLE = "whole"
    DAMAGED = "damaged"
    MISSING = "missing"
    REPLACED = "replaced"
    """By a server that keeps newer ones, while it was read."""


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    verdict: Integrity
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.verdict} ({self.detail})" if self.detail else self.verdict


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """Whose checkpoints they are."""

    trainer: str
    model: str
    """A folder, or a name for the hub."""
    allow_hub: bool = False


class RunArchive:
    def __init__(self, run_dir: Path) -> None:
        """Raises ConfigError where there is no run."""
        self.run_dir = run_dir
        self._journal = run_dir / "journal.sqlite"
        if not self._journal.is_file():
            raise ConfigError(f"{run_dir} holds no run: name a server's with --run-dir.")

    def checkpoints(self) -> list[CheckpointInfo]:
        """Newest first."""
        return self._read(_kept)

    def checkpoint(self, step: int) -> CheckpointInfo:
        """Raises ConfigError where there is none of this step."""
        known = self.checkpoints()
        for one in known:
            if one.step == step:
                return one
        steps = ", ".join(str(one.step) for one in reversed(known))
        there = f"there are those of steps {steps}" if known else "there is none yet"
        raise ConfigError(f"{self.run_dir} has no checkpoint of step {step}: {there}.")

    def best(self) -> CheckpointInfo:
        """Raises ConfigError where there is none."""
        known = self.checkpoints()
        found = best_checkpoint([one.saved for one in known])
        if found is None:
            raise ConfigError(f"{self.run_dir} has no checkpoint yet.")
        return next(one for one in known if one.saved is found)

    def last_step(self) -> int:
        """Where the run stands, saved or not."""
        return self._read(reads.log_position).last_step

    def folder(self, one: CheckpointInfo) -> Path:
        return self.run_dir / "checkpoints" / one.saved.folder

    def num_bytes(self, one: CheckpointInfo) -> int | None:
        """None where it is missing."""
        folder = self.folder(one)
        if not folder.is_dir():
            return None
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def strangers(self) -> list[str]:
        """Names beside the checkpoints that are none. A server that runs has such for a moment."""
        folder = self.run_dir / "checkpoints"
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        known = {one.saved.folder for one in self.checkpoints()}
        return [name for name in found if name not in known]

    def verify(self, one: CheckpointInfo, on_read: OnRead = int) -> IntegrityReport:
        finding = self._look(one, on_read)
        if finding.verdict is not Integrity.WHOLE and one not in self.checkpoints():
            return IntegrityReport(Integrity.REPLACED)
        return finding

    def trained_model(self, given: str | None, allow_hub: bool) -> TrainedModel:
        """`given` is for a model that lies elsewhere than when the run was begun. Raises
        ConfigError."""
        try:
            known = json.loads((self.run_dir / "model.json").read_bytes())
        except FileNotFoundError:
            raise ConfigError(f"{self.run_dir} does not say which model it trains.") from None
        if known["backend"] == "fake":
            raise ConfigError(f"{self.run_dir} is the fake engine's: there is no model to export.")
        if given is None and not (allow_hub or Path(known["model"]).is_dir()):
            raise ConfigError(
                f"The model of this run, {known['model']}, is not there any more: "
                "name its folder with --model."
            )
        model = find_model(given or known["model"], allow_hub)
        if fingerprint(model) != known["fingerprint"]:
            raise ConfigError(
                f"{model} is not the model that this run trains ({known['model']} when it was "
                "begun): name that one with --model."
            )
        return TrainedModel(known["backend"], model, allow_hub)

    def _look(self, one: CheckpointInfo, on_read: OnRead) -> IntegrityReport:
        folder = self.folder(one)
        if not folder.is_dir():
            return IntegrityReport(Integrity.MISSING)
        try:
            if digest(folder, on_read) == one.saved.digest:
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
    """From where a run stands to one of its checkpoints. Holds the run's directory until closed, so
    that no server starts meanwhile."""

    def __init__(self, run_dir: Path, step: int) -> None:
        """Raises ConfigError where there is no such checkpoint, or a server runs."""
        self.run = RunArchive(run_dir)
        self.to = self.run.checkpoint(step)
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
        self.newer = [one for one in self.run.checkpoints() if one.step > step]
        """Checkpoints that are given up."""
        self.last_step = self.run.last_step()
        self.lost = self._journal.read(reads.groups_trained_after, step)
        """Groups that are given up."""

    @property
    def is_none(self) -> bool:
        """Whether the next start goes on from there anyway."""
        return not (self.newer or self.lost or self.last_step > self.to.step)

    def go(self) -> None:
        """In the journal first: a folder that a crash leaves is swept away at the next start.
        Raises ConfigError."""
        log = RunLog(self._journal)
        log.record_abandoned(self.to.step, log.version + 1, "gone_back")
        if not self._journal.drain():
            raise ConfigError(
                f"The journal cannot be written ({self._journal.error or 'the disk is slow'}): "
                "mend that, and restore again."
            )
        self._folders.delete_except([one.folder for one in self._journal.read(reads.checkpoints)])

    def close(self) -> None:
        self._journal.close()
        self._lock.close()


async def export(
    run: RunArchive, one: CheckpointInfo, trained: TrainedModel, to: Path, dtype: str
) -> None:
    """As the trainer itself exports, in a process like its own; `to` appears when it is whole.
    Raises BackendError, OSError."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with _scratch(to.parent, f".{to.name}-") as aside, _scratch(None, "fakevllm-") as scratch:
        spec = EngineSpec(
            trained.trainer,
            scratch,  # not the run's own folder: there a server may have its socket
            trained.model,
            "export",
            allow_hub=trained.allow_hub,
            extra_args=_arguments(trained.trainer, run.folder(one), dtype),
            train_only=True,
        )
        trainer = ChildEngine(spec)
        try:
            await trainer.launch()
            await trainer.restore(run.folder(one).resolve())
            await trainer.export(aside / "model")
        except BaseException:
            with contextlib.suppress(OSError):
                shutil.copyfile(spec.log_file, run.run_dir / "export.log")
            raise
        finally:
            await trainer.close()
        (aside / "model").rename(to)


def _arguments(trainer: str, checkpoint: Path, dtype: str) -> list[str]:
    """Of a trainer that only exports: beside one that trains, so not where that computes."""
    if trainer != "verl":
        return ["--device=cpu", f"--dtype={dtype}"]
    workers = json.loads((checkpoint / "fsdp_config.json").read_bytes())["world_size"]
    return [f"--num-workers={workers}"]


def _kept(db: Connection) -> list[CheckpointInfo]:
    query = (
        "SELECT step, folder, version, digest, reward_mean, at, EXISTS (SELECT 1 FROM "
        "publications p WHERE p.step = c.step AND p.version >= c.version) "
        "FROM checkpoints c ORDER BY step DESC"
    )
    rows: list[Any] = list(db.exec_driver_sql(query))
    return [CheckpointInfo(SavedCheckpoint(*row[:5]), row[5], bool(row[6])) for row in rows]


@contextlib.contextmanager
def _scratch(parent: Path | None, prefix: str) -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as name:
        yield Path(name).resolve()
