"""What is charted of a run, read from the log in its journal: its steps, and its evaluations.

An evaluation is an episode that a client claimed to measure and not to train. It counts for the
step whose weights were served when it ended. Once such a step is over, its mean is a point. Where
steps are trained again, their evaluations come back behind them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from sqlalchemy import Connection

from fakevllm_adapters.protocol.swarm import LogEntry
from fakevllm_server.curves.names import charted

MAX_READ = 500
"""Entries at once."""
QUIET_S = 30.0
"""After which a step's evaluations are taken to be all there, though it is still the latest."""


@dataclass(frozen=True, slots=True)
class Point:
    step: int
    at: float
    """Unix seconds."""
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Restart:
    """What was charted from this step on was undone, or comes once more."""

    step: int
    at: float


ChartItem = Point | Restart


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a chart follows the journal."""

    entry: int = 0
    """Number of the last entry of the run's log."""
    evaluated_step: int = -1
    """The last step whose evaluations are charted."""
    num_evaluations: int = 0
    """That step's, when they were charted."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    step: int
    reward: float
    at: float


@dataclass(frozen=True, slots=True)
class Log:
    """A piece of the run's log, with the time its weights were served first, where it is known."""

    entries: Sequence[tuple[LogEntry, float | None]]

    def charted(self, now: float) -> list[ChartItem]:
        told: list[ChartItem] = []
        for entry, at in self.entries:
            if entry.kind == "step":
                told.append(Point(entry.step, at or now, charted(entry.step, entry.metrics)))
            elif entry.kind == "restored":
                told.append(Restart(entry.step + 1, at or now))
        return told


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Those from a cursor's step on, by step."""

    found: Sequence[Evaluation]
    served_step: int
    """Whose weights are served."""
    charted_step: int
    """The last that is charted: evaluations do not come before their step."""

    def charted(self, cursor: Cursor, now: float, *, is_last: bool) -> tuple[list[Point], Cursor]:
        """Of steps that are over: newer weights are served, nothing was heard of them for a while,
        or the run ends. One that has come to more since it was charted is charted again."""
        points: list[Point] = []
        for step, group in itertools.groupby(self.found, lambda one: one.step):
            own = list(group)
            is_quiet = now - own[-1].at > QUIET_S
            is_over = is_last or is_quiet or step < self.served_step
            if not is_over or step > self.charted_step:
                break
            moved = replace(cursor, evaluated_step=step, num_evaluations=len(own))
            if moved != cursor:
                points.append(_point(step, own))
            cursor = moved
        return points, cursor


def read_log(db: Connection, after: int) -> Log:
    query = (
        "SELECT e.entry_json, p.at FROM entries e LEFT JOIN publications p "
        "ON p.version = e.version AND e.version > 0 WHERE e.seq > ? ORDER BY e.seq LIMIT ?"
    )
    rows = db.exec_driver_sql(query, (after, MAX_READ))
    return Log([(LogEntry.model_validate_json(entry), at) for entry, at in rows])


def read_evaluations(db: Connection, cursor: Cursor) -> Evaluations:
    """But those of steps that were given up."""
    restored = "SELECT entry_json FROM entries WHERE kind = 'restored'"
    given_up = [one for one in _entries(db, restored) if one.reason]
    query = (
        "SELECT entry_json FROM entries WHERE kind = 'evaluated' AND step >= ? ORDER BY step, seq"
    )
    found = [
        Evaluation(one.step, one.metrics["reward"], one.at or 0.0)
        for one in _entries(db, query, cursor.evaluated_step)
        if not any(one.seq < undo.seq and one.step > undo.step for undo in given_up)
    ]
    served = "SELECT step FROM publications ORDER BY version DESC LIMIT 1"
    charted = (
        "SELECT step FROM entries WHERE kind IN ('step', 'restored') AND seq <= ? "
        "ORDER BY seq DESC LIMIT 1"
    )
    return Evaluations(
        found,
        db.exec_driver_sql(served).scalar() or 0,
        db.exec_driver_sql(charted, (cursor.entry,)).scalar() or 0,
    )


def read_back(db: Connection, restored: LogEntry, cursor: Cursor) -> Cursor:
    """Where a chart of evaluations goes on that has forgotten what came after a step."""
    if cursor.evaluated_step <= restored.step:
        return cursor
    query = "SELECT COUNT(*) FROM entries WHERE kind = 'evaluated' AND step = ? AND seq < ?"
    num = db.exec_driver_sql(query, (restored.step, restored.seq)).scalar_one()
    return replace(cursor, evaluated_step=restored.step, num_evaluations=num)


def _entries(db: Connection, query: str, *values: int) -> Iterator[LogEntry]:
    for (entry_json,) in db.exec_driver_sql(query, values):
        yield LogEntry.model_validate_json(entry_json)


def _point(step: int, evaluations: Sequence[Evaluation]) -> Point:
    rewards = [one.reward for one in evaluations]
    values = {
        "val/reward/mean": fmean(rewards),
        "val/reward/max": max(rewards),
        "val/reward/min": min(rewards),
        "val/episodes": float(len(rewards)),
    }
    return Point(step, evaluations[-1].at, values)
