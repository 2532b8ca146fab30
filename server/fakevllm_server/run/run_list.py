"""List the runs below a server's run directory, with their sizes. Reading takes no lock and changes
nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fakevllm_runtime.errors import ConfigError
from fakevllm_server.journal import reads
from fakevllm_server.journal.external_reader import read_journal_file
from fakevllm_server.run.metadata import experiment_of, model_of, read_metadata
from fakevllm_server.run.run_choice import RUNS, TOP, is_run_folder


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Facts about one run in a run directory: its folder, names, last step and size."""

    folder: str
    """Path of the run's folder, relative to the run directory."""
    experiment_name: str | None
    model: str | None
    """Name of the model that the run trains; None if it is unknown."""
    last_step: int | None
    """Last step that was trained; None if the journal cannot be read."""
    num_bytes: int
    """Size of all files of the run."""


def list_runs(run_dir: Path) -> list[RunSummary]:
    """Return all runs in a run directory. The run whose folder is the run directory itself comes
    first. The other runs follow, sorted by name.

    A symbolic link that leads out of the run directory does not count as a run, because the server
    does not open it.
    """
    root, below = run_dir.resolve(), run_dir / RUNS
    names = sorted(path.name for path in below.iterdir()) if below.is_dir() else []
    folders = [TOP, *(f"{RUNS}/{name}" for name in names)]
    return [
        _summary(run_dir, folder)
        for folder in folders
        if is_run_folder(folder)
        and (run_dir / folder).resolve().is_relative_to(root)
        and (run_dir / folder / "journal.sqlite").is_file()
    ]


def _summary(run_dir: Path, relative: str) -> RunSummary:
    folder = run_dir / relative
    text = read_metadata(folder)
    try:
        last_step = read_journal_file(folder / "journal.sqlite", reads.log_position).last_step
    except ConfigError:
        last_step = None
    skipped = folder / RUNS if relative == TOP else None
    num_bytes = sum(_sizes(folder, skipped))
    return RunSummary(relative, experiment_of(text), model_of(text), last_step, num_bytes)


def _sizes(folder: Path, skipped: Path | None) -> Iterator[int]:
    """Yield the size of each file below a folder, except for the files below `skipped`. A file that
    a running server deletes at the same time is left out."""
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if Path(parent, name) != skipped]
        for name in files:
            try:
                yield Path(parent, name).lstat().st_size
            except OSError:
                continue
