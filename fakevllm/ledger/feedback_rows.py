"""What was said of answers, beside the groups they are of. Reads block: call them off the event
loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection, Engine, select
from sqlalchemy.dialects import sqlite

from fakevllm.ledger import reads
from fakevllm.ledger.records import FeedbackRecord, FeedbackState
from fakevllm.ledger.tables import CALLS, FEEDBACK, GROUPS
from fakevllm.ledger.writer import WriteReceipt
from fakevllm.sessions.types import Kind, Place
from fakevllm_adapters.protocol.swarm import CapturedCall, LogEntry

_SAMPLE = "feedback:"
"""How the ids of samples begin, which are no group's."""
_PUT = str(FEEDBACK.insert().prefix_with("OR IGNORE").compile(dialect=sqlite.dialect()))
_ROW = attrgetter(*FEEDBACK.columns.keys())
_STANDS = """
    CASE WHEN state IN ('trained', 'dropped', 'lost')
    OR state = 'kept' AND reason IN ('taken_back', 'replaced') THEN {} ELSE {} END
"""
_OUTCOME = f"""
    UPDATE feedback SET
    state = {_STANDS.format("state", "?1")}, reason = {_STANDS.format("reason", "?2")},
    value = COALESCE(?3, value), baseline = COALESCE(?4, baseline),
    amount = COALESCE(?5, amount), hook_hash = COALESCE(?6, hook_hash)
    WHERE group_id = ?7 AND feedback_id = ?8
"""
_LOGGED = """
    UPDATE feedback SET state = ?, reason = ?, trained_step = ?, trained_version = ?
    WHERE group_id = ? AND feedback_id = ?
"""
_VOID = """
    UPDATE feedback SET state = 'kept', reason = ?
    WHERE group_id = ? AND feedback_id = ? AND state IN ('received', 'waiting')
"""
_TOO_LATE = """
    UPDATE feedback SET reason = 'too_late: what was said before counts already'
    WHERE group_id = ?1 AND feedback_id = ?2 AND EXISTS (
        SELECT 1 FROM feedback WHERE group_id = ?1 AND kind = 'feedback'
        AND state IN ('joined', 'pooled', 'trained'))
"""
_ANSWER = """
    SELECT group_id FROM (
        SELECT group_id, received_at FROM groups
        WHERE answer_id = ?1 AND app_key IS ?2 AND served_index IS NOT NULL
        UNION ALL SELECT group_id, received_at FROM groups
        WHERE group_id = ?1 AND app_key IS ?2 AND served_index IS NOT NULL
    ) ORDER BY received_at DESC LIMIT 1
"""
_OTHERS = """
    SELECT value FROM feedback WHERE app_key IS ? AND value IS NOT NULL
    AND COALESCE(reason, '') NOT IN ('taken_back', 'replaced')
    AND NOT (group_id = ? AND feedback_id = ?) ORDER BY received_at DESC LIMIT ?
"""
_SAME = """
    SELECT group_id FROM groups WHERE session_id = ? AND asked_key = ? AND group_id <> ?
    AND served_index IS NOT NULL ORDER BY received_at DESC LIMIT 1
"""
_PARENT = "SELECT group_id FROM groups WHERE group_id = ? AND turn < ? AND served_index IS NOT NULL"
_MEASURABLE = """
    SELECT f.group_id, f.feedback_id, g.group_id IS NULL FROM feedback AS f
    JOIN (SELECT app_key FROM feedback WHERE value IS NOT NULL
          AND COALESCE(reason, '') NOT IN ('taken_back', 'replaced')
          GROUP BY app_key HAVING COUNT(*) >= ?) AS enough ON enough.app_key IS f.app_key
    LEFT JOIN groups AS g ON g.group_id = f.group_id AND g.state = 'scored'
    WHERE f.state = 'waiting' ORDER BY f.received_at
"""


@dataclass(frozen=True, slots=True)
class ServedCalls:
    """What the engine saw and sampled of the answer an app got."""

    run_id: str | None
    calls: list[CapturedCall]
    is_known: bool
    """Whether it is known what all tokens were chosen from."""


def sample_id(row: FeedbackRecord) -> str:
    """Of the sample that a feedback becomes."""
    return f"{_SAMPLE}{row.group_id}/{row.feedback_id}"


def apply(db: Connection, entry: LogEntry) -> None:
    """What the run's log says of samples."""
    told: list[tuple[Any, ...]] = []
    match entry.kind:
        case "step":
            outcome = ("trained", None, entry.step, entry.version)
            told = [(*outcome, *key) for key in _keys(_in_loss(entry))]
            left_out = ("dropped", "not_trained", None, None)
            told += [(*left_out, *key) for key in _keys(_not_in_loss(entry))]
        case "dropped":
            for name, reason in entry.reasons.items():
                told += [("dropped", reason, None, None, *key) for key in _keys([name])]
        case "restored":
            reason = entry.reason or "server_crashed"
            told = [("lost", reason, None, None, *key) for key in _keys(entry.lost)]
        case _:
            pass
    if told:
        db.exec_driver_sql(_LOGGED, told)


def _in_loss(entry: LogEntry) -> list[str]:
    """Of a step whose line was written anew from a checkpoint, which measures nothing, it is not
    told which siblings they were."""
    return [one.group_id for one in entry.groups if one.siblings or not entry.metrics]


def _not_in_loss(entry: LogEntry) -> list[str]:
    return [one.group_id for one in entry.groups if entry.metrics and not one.siblings]


def _keys(ids: Iterable[str]) -> list[tuple[str, str]]:
    """Group and feedback id of those that are samples."""
    samples = [one.removeprefix(_SAMPLE).rpartition("/") for one in ids if one.startswith(_SAMPLE)]
    return [(group_id, feedback_id) for group_id, _, feedback_id in samples]


class FeedbackRows:
    def __init__(
        self, reading: Engine, put: Callable[[Callable[[Connection], None]], WriteReceipt]
    ) -> None:
        """`put`: the ledger's writer."""
        self._reading = reading
        self._put = put

    def record(self, row: FeedbackRecord) -> WriteReceipt:
        """Once: a second one of its name changes nothing."""
        return self._put(lambda db: _run(db, _PUT, _ROW(row)))

    def outcome(
        self,
        row: FeedbackRecord,
        state: FeedbackState,
        reason: str | None = None,
        *,
        value: float | None = None,
        baseline: float | None = None,
        amount: float | None = None,
        hook_hash: str | None = None,
    ) -> WriteReceipt:
        """What the run's log said first stands, and what is void; what is None stays."""
        told = (state.value, reason, value, baseline, amount, hook_hash)
        return self._put(partial(_run, sql=_OUTCOME, row=(*told, row.group_id, row.feedback_id)))

    def void(self, row: FeedbackRecord, reason: str) -> WriteReceipt:
        """It counts for nothing any more, unless it is on its way to be trained."""
        return self._put(partial(_run, sql=_VOID, row=(reason, row.group_id, row.feedback_id)))

    def taken_back(self, row: FeedbackRecord) -> WriteReceipt:
        """After all that could be voided was: `row` took nothing back where some of it counts."""
        return self._put(partial(_run, sql=_TOO_LATE, row=(row.group_id, row.feedback_id)))

    def answer(self, name: str, app_key: str | None) -> str | None:
        """That app's latest group whose answer it calls so, or by the group's own id."""
        return self._one(_ANSWER, name, app_key)

    def before(self, place: Place, group_id: str) -> str | None:
        """The group of which the request `group_id`, which stands there, says something."""
        if place.kind is not Kind.REGENERATES:
            return self._one(_PARENT, place.parent_id, place.turn)
        asked = place.asked_key
        return self._one(_SAME, place.session_id, asked, group_id) if asked else None

    def measurable(self, num: int) -> list[tuple[str, str, bool]]:
        """Group id, feedback id and whether the group is settled, of what waits and is one of at
        least `num` of its app that count. Oldest first."""
        with self._reading.connect() as db:
            found = db.exec_driver_sql(_MEASURABLE, (num,)).all()
        return [(group_id, name, bool(is_settled)) for group_id, name, is_settled in found]

    def waiting(self, group_id: str, feedback_id: str) -> FeedbackRecord | None:
        """None where it waits no longer."""
        is_it = (FEEDBACK.c.group_id == group_id) & (FEEDBACK.c.feedback_id == feedback_id)
        found = self._rows(is_it & (FEEDBACK.c.state == FeedbackState.WAITING.value))
        return found[0] if found else None

    def of_group(self, group_id: str) -> list[FeedbackRecord]:
        """Oldest first."""
        return self._rows(FEEDBACK.c.group_id == group_id)

    def of_session(self, session_id: str) -> list[FeedbackRecord]:
        """Oldest first."""
        groups = select(GROUPS.c.group_id).where(GROUPS.c.session_id == session_id)
        return self._rows(FEEDBACK.c.group_id.in_(groups))

    def in_state(self, state: FeedbackState) -> list[FeedbackRecord]:
        """Oldest first."""
        return self._rows(FEEDBACK.c.state == state.value)

    def others(self, row: FeedbackRecord, limit: int) -> list[float]:
        """What the app's other feedbacks counted for, latest first."""
        with self._reading.connect() as db:
            key = (row.app_key, row.group_id, row.feedback_id, limit)
            return list(db.exec_driver_sql(_OTHERS, key).scalars())

    def served_calls(self, group_id: str) -> ServedCalls:
        with self._reading.connect() as db:
            group = db.exec_driver_sql(
                "SELECT run_id, served_index FROM groups WHERE group_id = ?", (group_id,)
            ).one_or_none()
            run_id, served = (None, None) if group is None else group
            query = select(CALLS).where(CALLS.c.group_id == group_id, CALLS.c.sibling == served)
            rows = db.execute(query.order_by(CALLS.c.seq)).all()
        is_known = all(row.shaped is not None and not row.shaped for row in rows)
        return ServedCalls(run_id, [reads.call_of(row) for row in rows], is_known)

    def counts(self) -> dict[str, int]:
        """By state."""
        with self._reading.connect() as db:
            found = db.exec_driver_sql("SELECT state, COUNT(*) FROM feedback GROUP BY state")
            return {state: count for state, count in found}

    def _rows(self, where: Any) -> list[FeedbackRecord]:
        query = select(FEEDBACK).where(where).order_by(FEEDBACK.c.received_at)
        with self._reading.connect() as db:
            return [FeedbackRecord(**row) for row in db.execute(query).mappings()]

    def _one(self, query: str, *values: object) -> Any:
        with self._reading.connect() as db:
            return db.exec_driver_sql(query, values).scalar()


def _run(db: Connection, sql: str, row: tuple[Any, ...]) -> None:
    db.exec_driver_sql(sql, row)
