"""Looks into a server's journal, as `sqlite3` would."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def entries_of(run_dir: Path) -> list[Json]:
    """The run's log; nothing before there is a journal."""
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


def steps_of(run_dir: Path) -> list[Json]:
    return [entry for entry in entries_of(run_dir) if entry["kind"] == "step"]


def surviving_steps(entries: Sequence[Json]) -> list[Json]:
    """As the weights stand: what a kill undid was trained again, as it was planned."""
    standing: dict[int, Json] = {}
    for entry in entries:
        if entry["kind"] == "step":
            standing[entry["step"]] = entry
        if entry["kind"] == "restored":
            last: int = entry.get("step", 0)
            standing = {step: one for step, one in standing.items() if step <= last}
    return list(standing.values())
