"""What is charted of a run, read from its journal: steps as its log tells them, and evaluations.

An evaluation is an episode that a client claimed to measure and not to train. It counts for the
step whose weights were served when it ended. Once such a step is over, its mean is a point.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from sqlalchemy import Connection

from fakevllm_adapters.swarm import LogEntry
from fakevllm_server.curves.names import charted
from fakevllm_server.journal.tables import GroupState

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


Charted = Point | Restart


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a chart follows the journal."""

    entry: int = 0
    """Number of the last entry of the run's log."""
    evaluation: int = 0
    """Number of the group before the first evaluation of the last step that is charted."""
    num_evaluations: int = 0
    """That step's, when it was charted."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    seq: int
    reward: float
    at: float
    step: int


@dataclass(frozen=True, slots=True)
class Log:
    """A piece of the run's log, with the time its weights were served first, where it is known."""

    entries: Sequence[tuple[LogEntry, float | None]]

    def charted(self, now: float) -> list[Charted]:
        told: list[Charted] = []
        for entry, at in self.entries:
            if entry.kind == "step":
                told.append(Point(entry.step, at or now, charted(entry.step, entry.metrics)))
            elif entry.kind == "restored":
                told.append(Restart(entry.step + 1, at or now))
        return told


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Those from a cursor on, in order, and the step whose weights are served."""

    found: Sequence[Evaluation]
    newest_step: int

    def charted(self, cursor: Cursor, now: float, *, is_last: bool) -> tuple[list[Point], Cursor]:
        """Of steps that are over: newer weights are served, nothing was heard of them for a while,
        or the run ends. One that has come to more since it was charted is charted again."""
        points: list[Point] = []
        for step, group in itertools.groupby(self.found, lambda one: one.step):
            own = list(group)
            is_quiet = now - own[-1].at > QUIET_S
            if not (is_last or is_quiet or step < self.newest_step):
                break
            moved = replace(cursor, evaluation=own[0].seq - 1, num_evaluations=len(own))
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


def read_evaluations(db: Connection, after: int) -> Evaluations:
    """But those of weights that were undone."""
    publications = db.exec_driver_sql(
        "SELECT at, step, version FROM publications ORDER BY version"
    ).all()
    undone = db.exec_driver_sql("SELECT step, version FROM entries WHERE kind = 'restored'").all()
    query = (
        "SELECT g.seq, s.reward, b.at FROM groups g JOIN samples s ON s.group_id = g.group_id "
        "JOIN submissions b ON b.\"key\" = 'episode:' || g.group_id "
        "WHERE g.state = ? AND g.seq > ? AND s.reward IS NOT NULL ORDER BY g.seq"
    )
    found: list[Evaluation] = []
    for seq, reward, at in db.exec_driver_sql(query, (GroupState.EVAL, after)):
        served = bisect_right(publications, at, key=lambda row: row[0])
        _, step, version = publications[served - 1] if served else (0.0, 0, 0)
        if not any(to < step and version < since for to, since in undone):
            found.append(Evaluation(seq, reward, at, step))
    return Evaluations(found, publications[-1][1] if publications else 0)


def _point(step: int, evaluations: Sequence[Evaluation]) -> Point:
    rewards = [one.reward for one in evaluations]
    values = {
        "val/reward/mean": fmean(rewards),
        "val/reward/max": max(rewards),
        "val/reward/min": min(rewards),
        "val/episodes": float(len(rewards)),
    }
    return Point(step, evaluations[-1].at, values)
