"""The points of a run's curves. They are read from the run log, which is the part of the journal
that records steps and evaluations, and from the history of releases.

An evaluation is an episode that measures the model. The model is not trained on evaluations. An
evaluation belongs to the step whose weights were served when the episode ended. When no more
evaluations of a step are expected, the mean of the step's evaluations becomes one point. If steps
are trained again after a crash, the points of these steps and of their evaluations are written
again.

A decision about releases is a point at the step that training had reached. If training went back to
an earlier step later, the point is at this earlier step, because the curves no longer have the
later one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from sqlalchemy import Connection

from fakevllm_adapters.protocol.releases import GATE, GUARD, Decision
from fakevllm_adapters.protocol.swarm import LogEntry
from fakevllm_server.curves.metric_names import OWN_PREFIX, curve_values
from fakevllm_server.curves.sample_tables import SampleTable
from fakevllm_server.journal import reads
from fakevllm_server.journal.rows import ReleaseRow

MAX_READ = 500
"""Maximum number of log entries read at once."""
REWARD_CURVES = ("critic/score/", "critic/rewards/")
"""Beginnings of the names of the curves that show rewards."""
REWARD_CHANGES = OWN_PREFIX + "reward_changes"
"""Name of the texts that say why the reward curves are interrupted."""
RELEASES = OWN_PREFIX + "releases"
"""Name of the texts about decisions, and beginning of the names of the curves of decisions."""
MISSING_SAMPLES = OWN_PREFIX + "samples_missing"
"""Name of the curve that counts the groups which a table of sampled answers lacks."""
HOLDS: Mapping[Decision, float] = {Decision.HOLD: 1.0, Decision.RESUME: 0.0}
"""Decisions about all releases, with their values in the curve that shows whether releases are
held."""
QUIET_S = 30.0
"""Seconds without a new evaluation after which the latest step's evaluations are considered
complete."""


@dataclass(frozen=True, slots=True)
class Point:
    """The values of several curves at one step."""

    step: int
    at: float
    """Time of the point in Unix seconds."""
    values: dict[str, float]
    """Maps the name of each curve to its value at the step."""
    texts: dict[str, str] = field(default_factory=dict[str, str])
    """Texts that are shown at the step, by name."""
    table: SampleTable | None = None
    """Table of sampled answers of the step, which has the name COMPLETIONS."""


@dataclass(frozen=True, slots=True)
class Restart:
    """A rollback of the run to the step before `step`. The rollback makes the points of `step` and
    of all later steps invalid. If these steps are trained again, new points are written."""

    step: int
    at: float
    """Time of the rollback in Unix seconds."""


ChartItem = Point | Restart


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position in the journal (the server's database) up to which the curves are written."""

    entry: int = 0
    """Sequence number of the last entry of the run log that was written to the curves."""
    evaluated_step: int = -1
    """The last step whose evaluations were written."""
    num_evaluations: int = 0
    """Number of evaluations of `evaluated_step` that were written."""
    release: int = 0
    """Number of the last decision about releases that was written."""
    has_tables: bool = False
    """Whether a table of sampled answers was written, or was about to be. If so, the tracker's
    files may have texts."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The reward of one evaluation episode."""

    step: int
    """Step whose weights were served when the episode ended."""
    reward: float
    at: float
    """End of the episode in Unix seconds."""


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Consecutive entries of the run log (the server's record of steps) that were read together."""

    entries: Sequence[tuple[LogEntry, float | None]]
    """Pairs of an entry and the time in Unix seconds at which the entry's weights were first
    served. The time is None if the journal does not contain the time."""

    def chart_items(
        self, now: float, read_table: Callable[[LogEntry], SampleTable | None] | None = None
    ) -> list[ChartItem]:
        """Return the items to write to the curves: a Point for each trained step, and a Restart for
        each rollback of the run.

        An item whose time is unknown gets the time `now`. `read_table` returns the table of sampled
        answers of a step. None means that no tables are written.
        """
        items: list[ChartItem] = []
        for entry, at in self.entries:
            if entry.kind == "step":
                if entry.changed:
                    items.append(_break(entry, at or now))
                table = None if read_table is None else read_table(entry)
                items.append(_step_point(entry, at or now, table))
            elif entry.kind == "restored":
                items.append(Restart(entry.step + 1, at or now))
        return items


@dataclass(frozen=True, slots=True)
class Evaluations:
    """The evaluation episodes whose points may still have to be written. They belong to the last
    step whose evaluations were written, and to all later steps."""

    evaluations: Sequence[Evaluation]
    """Evaluations, ordered by step."""
    served_step: int
    """Step whose weights are served now."""
    charted_step: int
    """The last step whose point was written. Evaluations of later steps must wait until the point
    of their step is written."""

    def new_points(
        self, cursor: Cursor, now: float, *, is_last: bool
    ) -> tuple[list[Point], Cursor]:
        """Return (points, next cursor). There is one point for each step whose evaluations are
        considered complete. Steps without a new evaluation get no point.

        The evaluations of a step are considered complete in any of three cases:

        * The weights of a later step are served.
        * The last evaluation of the step ended more than QUIET_S seconds before `now`.
        * The run has ended (`is_last`).

        If more evaluations of the step arrive later, the step gets a second point, which is the
        mean of all its evaluations.
        """
        points: list[Point] = []
        for step, group in itertools.groupby(self.evaluations, lambda one: one.step):
            of_step = list(group)
            # A time in the future shows that the clock was set back.
            is_quiet = abs(now - of_step[-1].at) > QUIET_S
            is_complete = is_last or is_quiet or step < self.served_step
            if not is_complete or step > self.charted_step:
                break
            moved = replace(cursor, evaluated_step=step, num_evaluations=len(of_step))
            if moved != cursor:
                points.append(_point(step, of_step))
            cursor = moved
        return points, cursor


def read_log(db: Connection, after: int) -> LogPiece:
    """Read up to MAX_READ entries of the run log (the server's record of its steps and
    evaluations). Only entries whose number is above `after` are read."""
    query = (
        "SELECT e.entry_json, p.at FROM entries e LEFT JOIN publications p "
        "ON p.version = e.version AND e.version > 0 WHERE e.seq > ? ORDER BY e.seq LIMIT ?"
    )
    rows = db.exec_driver_sql(query, (after, MAX_READ))
    return LogPiece([(LogEntry.model_validate_json(entry), at) for entry, at in rows])


def read_evaluations(db: Connection, cursor: Cursor) -> Evaluations:
    """Read the evaluations of the last step whose evaluations were written
    (`cursor.evaluated_step`), and of all later steps.

    If a rollback gave up some steps, the earlier evaluations of these steps are left out. After any
    other rollback, the steps are trained again.
    """
    restored = "SELECT entry_json FROM entries WHERE kind = 'restored'"
    # A rollback with a reason gives later steps up; without one, they are trained again.
    given_up = [entry for entry in _entries(db, restored) if entry.reason]
    query = (
        "SELECT entry_json FROM entries WHERE kind = 'evaluated' AND step >= ? ORDER BY step, seq"
    )
    evaluations = [
        Evaluation(entry.step, entry.metrics["reward"], entry.at or 0.0)
        for entry in _entries(db, query, cursor.evaluated_step)
        if not any(entry.seq < undo.seq and entry.step > undo.step for undo in given_up)
    ]
    served = "SELECT step FROM publications ORDER BY version DESC LIMIT 1"
    charted = (
        "SELECT step FROM entries WHERE kind IN ('step', 'restored') AND seq <= ? "
        "ORDER BY seq DESC LIMIT 1"
    )
    return Evaluations(
        evaluations,
        served_step=db.exec_driver_sql(served).scalar() or 0,
        charted_step=db.exec_driver_sql(charted, (cursor.entry,)).scalar() or 0,
    )


def read_releases(db: Connection, cursor: Cursor) -> tuple[list[Point], Cursor]:
    """Return (points, next cursor) for the decisions about releases that are not written yet. A
    decision waits until the point of its step is written."""
    points: list[Point] = []
    for row in reads.releases(db, cursor.release):
        step = _step_of_release(db, row, cursor.entry)
        if step is None:
            break
        points.append(_release_point(row, step))
        cursor = replace(cursor, release=row.record.number)
    return points, cursor


def cursor_after_rollback(db: Connection, restored: LogEntry, cursor: Cursor) -> Cursor:
    """Return the cursor after a rollback of the run to the step `restored.step`. The cursor is the
    position up to which the curves are written. `restored` is the rollback's entry in the run log.

    With the new cursor, the evaluations of all steps after `restored.step` are written again, and
    so are the decisions about releases that were shown at these steps.
    """
    for row in reads.releases(db):
        if row.record.number > cursor.release or row.newest >= restored.version:
            break
        if (_step_of_release(db, row, restored.seq - 1) or 0) > restored.step:
            cursor = replace(cursor, release=row.record.number - 1)
            break
    if cursor.evaluated_step <= restored.step:
        return cursor
    query = "SELECT COUNT(*) FROM entries WHERE kind = 'evaluated' AND step = ? AND seq < ?"
    num = db.exec_driver_sql(query, (restored.step, restored.seq)).scalar_one()
    return replace(cursor, evaluated_step=restored.step, num_evaluations=num)


def _break(entry: LogEntry, at: float) -> Point:
    """Return a point whose rewards are NaN. TensorBoard interrupts the curves of rewards at such a
    point.

    The point is written before a step whose rewards cannot be compared with earlier rewards.
    """
    values = curve_values(entry.step, entry.metrics)
    text = (
        f"Step {entry.step}: {entry.changed}. Earlier rewards are not comparable with later ones."
    )
    rewards = {name: math.nan for name in values if name.startswith(REWARD_CURVES)}
    return Point(entry.step, at, rewards, {REWARD_CHANGES: text})


def _step_point(entry: LogEntry, at: float, table: SampleTable | None) -> Point:
    """Return the point of a trained step. `table` is None if no table is due at the step."""
    values = curve_values(entry.step, entry.metrics)
    if table is None:
        return Point(entry.step, at, values)
    values[MISSING_SAMPLES] = float(table.num_missing)
    return Point(entry.step, at, values, table=table if table.rows else None)


def _step_of_release(db: Connection, row: ReleaseRow, last_seq: int) -> int | None:
    """Return the step at which a decision is shown. Return None if the entry of this step has a
    number above `last_seq` in the run log."""
    query = (
        "SELECT seq, step FROM entries WHERE kind IN ('step', 'restored') AND version <= ? "
        "ORDER BY seq DESC LIMIT 1"
    )
    seq, step = db.exec_driver_sql(query, (row.newest,)).one_or_none() or (0, 0)
    if seq > last_seq:
        return None
    query = "SELECT MIN(step) FROM entries WHERE kind = 'restored' AND version > ? AND seq <= ?"
    restored_step = db.exec_driver_sql(query, (row.newest, last_seq)).scalar()
    return step if restored_step is None else min(step, restored_step)


def _release_point(row: ReleaseRow, step: int) -> Point:
    """Return the point of a decision. Its text does not name the operator, because the curves may
    be sent to other machines."""
    record = row.record
    by = {GATE: "the release gate", GUARD: "the guard"}.get(record.decided_by, "an operator")
    decision = record.decision
    if record.version is None:
        values = {f"{RELEASES}/held": HOLDS[decision]} if decision in HOLDS else {}
        text = f"Releases: {decision} by {by}."
    else:
        values = {f"{RELEASES}/{decision}": float(record.version)}
        text = f"Version {record.version}: {decision} by {by}."
    if row.restored is not None:
        text += f" Training went back to version {row.restored}."
    return Point(step, record.time_s, values, {RELEASES: text})


def _entries(db: Connection, query: str, *values: int) -> Iterator[LogEntry]:
    """Yield the entries of the run log that an SQL query selects."""
    for (entry_json,) in db.exec_driver_sql(query, values):
        yield LogEntry.model_validate_json(entry_json)


def _point(step: int, evaluations: Sequence[Evaluation]) -> Point:
    """Return the point that shows the mean of all evaluations of a step."""
    rewards = [evaluation.reward for evaluation in evaluations]
    values = {
        "val/reward/mean": fmean(rewards),
        "val/reward/max": max(rewards),
        "val/reward/min": min(rewards),
        "val/episodes": float(len(rewards)),
    }
    return Point(step, evaluations[-1].at, values)
