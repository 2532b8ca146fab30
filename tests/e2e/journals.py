"""Looks into a server's journal, as `sqlite3` would."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any


def entries_of(run_dir: Path) -> list[Any]:
    """The run's log; nothing before there is a journal."""
    return [json.loads(row["entry_json"]) for row in rows_of(run_dir, "entries order by seq")]


def steps_of(run_dir: Path) -> list[Any]:
    return [entry for entry in entries_of(run_dir) if entry["kind"] == "step"]


def rows_of(run_dir: Path, table: str) -> list[Any]:
    """Rows that can be asked by column name."""
    file = run_dir / "journal.sqlite"
    if not file.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as journal:
        journal.row_factory = sqlite3.Row
        try:
            return journal.execute(f"select * from {table}").fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return []
            raise


def survivors_of(run_dir: Path) -> list[Any]:
    """Steps as the weights stand: those that were undone are not among them."""
    standing: dict[int, Any] = {}
    for entry in entries_of(run_dir):
        if entry["kind"] == "step":
            standing[entry["step"]] = entry
        if entry["kind"] == "restored":
            standing = {step: one for step, one in standing.items() if step <= entry.get("step", 0)}
    return list(standing.values())
