"""Checks of a proxy's ledger after processes were killed, shared by `mixed_traffic` and
`demo_kills`."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.run_log_reader import surviving_steps

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: a line of a table in RESULTS.md."""

    claim: str
    figures: str
    holds: bool | None
    """Whether the condition of the line is true. None if the line has no condition, or if nothing
    was measured."""

    @property
    def mark(self) -> str:
        """The first cell of the line: "ok", "FAILED", or "info" if `holds` is None."""
        return "info" if self.holds is None else "ok" if self.holds else "FAILED"


def read_rows(file: Path, sql: str) -> list[Json]:
    """Return the rows of a query on a SQLite file, which is opened for reading only."""
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db:
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute(sql)]


def check_file(ledger: Path) -> Finding:
    """Check the integrity of the SQLite file and its foreign keys."""
    with closing(sqlite3.connect(ledger)) as db:
        integrity = str(db.execute("pragma integrity_check").fetchone()[0])
        dangling = db.execute("pragma foreign_key_check").fetchall()
    figures = f"integrity_check {integrity}, {len(dangling)} dangling rows"
    return Finding("the ledger is whole", figures, integrity == "ok" and not dangling)


def is_waiting(row: Json) -> bool:
    """Return whether a group or a feedback may still be trained."""
    return row["state"] in ("scored", "received", "pooled")


def check_states(groups: Sequence[Json], samples: Sequence[Json] = ()) -> list[Finding]:
    """Check that every group and every feedback has reached a final state other than `lost`."""
    rows = [*groups, *samples]
    group_states = Counter(group["state"] for group in groups)
    sample_states = Counter(sample["state"] for sample in samples)
    waiting = [row["group_id"] for row in rows if is_waiting(row)]
    lost = Counter(row["reason"] for row in rows if row["state"] == "lost")
    reasons = Counter(f"{row['state']}: {row['reason']}" for row in rows if row["reason"])
    return [
        Finding(
            "no group is left scored or pooled",
            f"{len(groups)} groups: {dict(group_states)}; {len(samples)} feedbacks: "
            f"{dict(sample_states)} {' '.join(waiting[:5])}",
            not waiting,
        ),
        Finding(
            "no group was lost",
            f"{lost.total()} {dict(lost)}",
            not lost,
        ),
        Finding("why groups were not trained", f"{dict(reasons.most_common())}", None),
    ]


def check_trained_once(entries: Sequence[Json], rows: Sequence[Json]) -> list[Finding]:
    """Check that no group was trained twice, and that run log and ledger agree on what was trained.

    `entries` are those of the server's run log. `rows` are the ledger's groups and feedbacks.
    """
    steps = surviving_steps(entries)
    counts = Counter[str](group["group_id"] for entry in steps for group in entry["groups"])
    num_undone = sum(entry["kind"] == "step" for entry in entries) - len(steps)
    twice = [name for name, count in counts.items() if count > 1]
    in_log = set(counts)
    in_ledger: set[str] = {row["group_id"] for row in rows if row["state"] == "trained"}
    return [
        Finding(
            "no group was trained twice",
            f"{len(steps)} steps of {len(counts)} groups and feedbacks, twice {twice[:5]}",
            bool(counts) and not twice,
        ),
        Finding(
            "ledger and server agree on what was trained",
            f"{len(in_ledger)} and {len(in_log)}; {num_undone} steps were undone by kills and "
            f"taken again; only in one file: {sorted(in_ledger ^ in_log)[:5]}",
            in_ledger == in_log,
        ),
    ]
