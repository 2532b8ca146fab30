"""Read-only access to the run log in a server's journal, `journal.sqlite` in its run directory."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def read_log_entries(run_dir: Path) -> list[Json]:
    """Return all entries of the run log, oldest first. Return [] if there is no journal yet."""
    file = run_dir / "journal.sqlite"
    if not file.exists():
        return []
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as journal:
        try:
            rows = journal.execute("select entry_json from entries order by seq").fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return []
            raise
    return [json.loads(row[0]) for row in rows]


def read_step_entries(run_dir: Path) -> list[Json]:
    """Return the entries of the training steps, oldest first. Steps that a kill has undone are
    included."""
    return [entry for entry in read_log_entries(run_dir) if entry["kind"] == "step"]


def surviving_steps(entries: Sequence[Json]) -> list[Json]:
    """Return the entries of the steps from which the latest weights result.

    A kill undoes the steps after the last checkpoint. The server then trains them again from the
    batches that it had planned.
    """
    steps: dict[int, Json] = {}
    for entry in entries:
        if entry["kind"] == "step":
            steps[entry["step"]] = entry
        if entry["kind"] == "restored":
            restored_step: int = entry.get("step", 0)
            steps = {step: kept for step, kept in steps.items() if step <= restored_step}
    return list(steps.values())
