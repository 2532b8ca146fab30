"""The rows of the ledger's table `feedback`, and the queries on this table. The methods that read
block the thread, so do not call them on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection, Engine, select
from sqlalchemy.dialects import sqlite

from fakevllm.ledger import reads
from fakevllm.ledger.forgotten_groups import is_forgotten
from fakevllm.ledger.reasons import EndReason
from fakevllm.ledger.records import FeedbackRecord, FeedbackState
from fakevllm.ledger.redacted_records import RecordRedactor
from fakevllm.ledger.tables import CALLS, FEEDBACK, GROUPS
from fakevllm.ledger.writer import WriteReceipt
from fakevllm.sessions.types import Kind, Place
from fakevllm_adapters.protocol.forgetting import FORGOTTEN
from fakevllm_adapters.protocol.swarm import CapturedCall, LogEntry

_SAMPLE = "feedback:"
"""Prefix of the ids of training samples that are made from feedback. In the server's run log, the
prefix distinguishes these samples from groups (requests with their sampled answers)."""
_INSERT = str(FEEDBACK.insert().prefix_with("OR IGNORE").compile(dialect=sqlite.dialect()))
_VALUES = attrgetter(*FEEDBACK.columns.keys())
# An outcome from the run log stays, and so does a withdrawal.
_UNLESS_FINAL = """
    CASE WHEN state IN ('trained', 'dropped', 'lost')
    OR state = 'kept' AND reason IN ('taken_back', 'replaced') THEN {} ELSE {} END
"""
_OUTCOME = f"""
    UPDATE feedback SET
    state = {_UNLESS_FINAL.format("state", "?1")}, reason = {_UNLESS_FINAL.format("reason", "?2")},
    value = COALESCE(?3, value), baseline = COALESCE(?4, baseline),
    amount = COALESCE(?5, amount), hook_hash = COALESCE(?6, hook_hash)
    WHERE group_id = ?7 AND feedback_id = ?8
"""
_APPLY_LOG = """
    UPDATE feedback SET state = ?, reason = ?, trained_step = ?, trained_version = ?
    WHERE group_id = ? AND feedback_id = ?
"""
_VOID = """
    UPDATE feedback SET state = 'kept', reason = ?
    WHERE group_id = ? AND feedback_id = ? AND state IN ('received', 'waiting')
"""
_MARK_TOO_LATE = """
    UPDATE feedback SET reason = 'too_late: earlier feedback counts already'
    WHERE group_id = ?1 AND feedback_id = ?2 AND EXISTS (
        SELECT 1 FROM feedback WHERE group_id = ?1 AND kind = 'feedback'
        AND (state IN ('joined', 'pooled', 'trained') OR edit_state IN ('pooled', 'trained')))
"""
_FIND_GROUP = """
    SELECT group_id FROM (
        SELECT group_id, received_at FROM groups
        WHERE answer_id = ?1 AND app_key IS ?2 AND served_index IS NOT NULL
        UNION ALL SELECT group_id, received_at FROM groups
        WHERE group_id = ?1 AND app_key IS ?2 AND served_index IS NOT NULL
        AND group_id NOT IN (SELECT group_id FROM forgotten_groups WHERE group_id = ?1)
    ) ORDER BY received_at DESC LIMIT 1
"""
_OWNER = """
    SELECT app_key FROM (
        SELECT app_key, received_at FROM group_rows
        WHERE answer_id = ?1 AND served_index IS NOT NULL
        UNION ALL SELECT app_key, received_at FROM group_rows
        WHERE group_id = ?1 AND served_index IS NOT NULL
    ) ORDER BY received_at DESC LIMIT 1
"""
_OTHER_VALUES = """
    SELECT value FROM feedback WHERE app_key IS ? AND value IS NOT NULL
    AND COALESCE(reason, '') NOT IN ('taken_back', 'replaced', 'other_arm')
    AND NOT (group_id = ? AND feedback_id = ?) ORDER BY received_at DESC LIMIT ?
"""
_SAME_HISTORY = """
    SELECT group_id FROM groups WHERE session_id = ? AND asked_key = ? AND group_id <> ?
    AND served_index IS NOT NULL ORDER BY received_at DESC LIMIT 1
"""
_PARENT = "SELECT group_id FROM groups WHERE group_id = ? AND turn < ? AND served_index IS NOT NULL"
_WITH_BASELINE = """
    SELECT f.group_id, f.feedback_id, g.group_id IS NULL FROM feedback AS f
    JOIN (SELECT app_key FROM feedback WHERE value IS NOT NULL
          AND COALESCE(reason, '') NOT IN ('taken_back', 'replaced')
          GROUP BY app_key HAVING COUNT(*) >= ?) AS enough ON enough.app_key IS f.app_key
    LEFT JOIN groups AS g ON g.group_id = f.group_id AND g.state = 'scored'
    WHERE f.state = 'waiting' ORDER BY f.received_at
"""


@dataclass(frozen=True, slots=True)
class ServedCalls:
    """The model calls that produced an answer which an app received, with the tokens of these
    calls."""

    run_id: str | None
    calls: list[CapturedCall]
    is_unshaped: bool
    """Whether the trainer can reproduce the distribution from which each token was sampled. False
    if a token was sampled from a restricted part of the vocabulary (`CapturedCall.shaped`), or if
    this is not known."""


def sample_id(row: FeedbackRecord) -> str:
    """Return the id of the training sample that is made from this feedback."""
    return sample_name(row.group_id, row.feedback_id)


def sample_name(group_id: str, feedback_id: str) -> str:
    """Return the id of the training sample that is made from the feedback with these ids."""
    return f"{_SAMPLE}{group_id}/{feedback_id}"


def apply_log_entry(db: Connection, entry: LogEntry) -> None:
    """Apply one entry of the server's run log to the table `feedback`. The entry says which
    feedback samples were trained, dropped or lost."""
    rows = sample_outcomes(entry, _SAMPLE)
    if rows:
        db.exec_driver_sql(_APPLY_LOG, rows)


def sample_outcomes(entry: LogEntry, prefix: str) -> list[tuple[Any, ...]]:
    """Return the outcomes of training samples that were made from feedback, as one entry of the
    server's run log reports them. The ids of these samples begin with `prefix`. Each item has the
    state, the reason, the step and the version, and then the sample's group id and feedback id."""
    rows: list[tuple[Any, ...]] = []
    match entry.kind:
        case "step":
            trained = ("trained", None, entry.step, entry.version)
            rows = [(*trained, *key) for key in _sample_keys(_in_loss(entry), prefix)]
            left_out = ("dropped", "not_trained", None, None)
            rows += [(*left_out, *key) for key in _sample_keys(_not_in_loss(entry), prefix)]
        case "dropped":
            for group_id, reason in entry.reasons.items():
                keys = _sample_keys([group_id], prefix)
                rows += [("dropped", reason, None, None, *key) for key in keys]
        case "restored":
            reason = entry.reason or EndReason.SERVER_CRASHED.value
            rows = [("lost", reason, None, None, *key) for key in _sample_keys(entry.lost, prefix)]
        case _:
            pass
    return rows


def _in_loss(entry: LogEntry) -> list[str]:
    """Return the ids of the groups that contributed to the loss of a training step.

    `entry` is the run log's entry for the step. A group contributed to the loss if the entry names
    at least one trained sibling (sampled answer) of the group. An entry that was restored from a
    checkpoint has no metrics and names no siblings. For such an entry, the ids of all groups are
    returned.
    """
    return [group.group_id for group in entry.groups if group.siblings or not entry.metrics]


def _not_in_loss(entry: LogEntry) -> list[str]:
    return [group.group_id for group in entry.groups if entry.metrics and not group.siblings]


def _sample_keys(ids: Iterable[str], prefix: str) -> list[tuple[str, str]]:
    """Return a pair (group id, feedback id) for each id that begins with `prefix`. Such an id
    belongs to a training sample that was made from feedback. Ids of ordinary groups are left
    out."""
    samples = [one.removeprefix(prefix).rpartition("/") for one in ids if one.startswith(prefix)]
    return [(group_id, feedback_id) for group_id, _, feedback_id in samples]


class FeedbackRows:
    """Reader and writer of the table `feedback`."""

    def __init__(
        self,
        read_engine: Engine,
        put: Callable[[Callable[[Connection], None]], WriteReceipt],
        redactor: RecordRedactor,
    ) -> None:
        """Create the object. `put` is the function that queues a change for the thread that writes
        the ledger."""
        self._read_engine = read_engine
        self._put = put
        self._redactor = redactor

    def record(self, row: FeedbackRecord) -> WriteReceipt:
        """Store one item of feedback. If feedback with the same group id and feedback id is already
        stored, nothing changes. Texts about a forgotten group are not stored."""
        return self._put(partial(_record, row=self._redactor.feedback(row)))

    def set_outcome(
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
        """Set the state and the reason of one item of feedback. Also set the columns `value`,
        `baseline`, `amount` and `hook_hash` for which an argument is given.

        The state and the reason stay unchanged in two cases:

        * The server's run log has already set a final state.
        * The user has taken the feedback back or replaced it.
        """
        reason = None if reason is None else self._redactor.text(reason)
        values = (state.value, reason, value, baseline, amount, hook_hash)
        key = (row.group_id, row.feedback_id)
        return self._put(partial(_set_outcome, row=(*values, *key), group_id=row.group_id))

    def void(self, row: FeedbackRecord, reason: str) -> WriteReceipt:
        """Mark feedback as void, because the user took the feedback back or replaced it. If the
        feedback was already added to a reward or sent to the server, nothing changes."""
        return self._put(partial(_run, sql=_VOID, row=(reason, row.group_id, row.feedback_id)))

    def mark_too_late(self, row: FeedbackRecord) -> WriteReceipt:
        """Record that the user took feedback back too late. `row` is the user's withdrawal. The
        reason of `row` becomes `too_late` if earlier feedback on the same answer was already added
        to a reward or sent to the server.

        First call `void` for all earlier feedback on the answer, then this method.
        """
        return self._put(partial(_run, sql=_MARK_TOO_LATE, row=(row.group_id, row.feedback_id)))

    def find_group(self, answer_id: str, app_key: str | None) -> str | None:
        """Return the id of the app's latest answered request whose answer id or group id is
        `answer_id`. Return None if there is no such request."""
        return self._one(_FIND_GROUP, self._redactor.id(answer_id), app_key)

    def owner_of(self, answer_id: str) -> str | None:
        """Find the latest answered request whose answer id or group id is `answer_id`, and return
        the fingerprint of its API key. Return None if there is no such request, or if it had no
        key."""
        return self._one(_OWNER, self._redactor.id(answer_id))

    def preceding_group(self, place: Place, group_id: str) -> str | None:
        """If the request `group_id` is implicit feedback on an earlier answer, return the group id
        of that answer. Return None if the request is no implicit feedback. Also return None if the
        ledger does not have the earlier answer.

        A request that regenerates an answer is feedback on the latest other answer to the same
        history. A request that begins a new turn is feedback on the answer that precedes the turn.
        """
        if place.kind is not Kind.REGENERATES:
            return self._one(_PARENT, place.parent_id, place.turn)
        if not place.asked_key:
            return None
        return self._one(_SAME_HISTORY, place.session_id, place.asked_key, group_id)

    def with_baseline(self, num: int) -> list[tuple[str, str, bool]]:
        """Return the feedback in the state `waiting` for which a baseline can be computed, oldest
        first. An app must have at least `num` feedback values for a baseline.

        Each item is a triple (group id, feedback id, is_settled). `is_settled` is False if the
        server has not acknowledged the group's rewards yet. In this case, the group is in the state
        `scored`.
        """
        with self._read_engine.connect() as db:
            rows = db.exec_driver_sql(_WITH_BASELINE, (num,)).all()
        return [
            (group_id, feedback_id, bool(is_settled)) for group_id, feedback_id, is_settled in rows
        ]

    def waiting(self, group_id: str, feedback_id: str) -> FeedbackRecord | None:
        """Return the feedback with these ids if it is still in the state `waiting`, else None.
        Feedback in this state waits to be sent to the server as a training sample."""
        has_key = (FEEDBACK.c.group_id == group_id) & (FEEDBACK.c.feedback_id == feedback_id)
        rows = self._rows(has_key & (FEEDBACK.c.state == FeedbackState.WAITING.value))
        return rows[0] if rows else None

    def find(self, group_id: str, feedback_id: str) -> FeedbackRecord | None:
        """Return the feedback with these ids, or None if the ledger does not have it."""
        rows = self._rows(
            (FEEDBACK.c.group_id == group_id) & (FEEDBACK.c.feedback_id == feedback_id)
        )
        return rows[0] if rows else None

    def of_group(self, group_id: str) -> list[FeedbackRecord]:
        """Return all feedback on the answer that was served for a group (request), oldest first."""
        return self._rows(FEEDBACK.c.group_id == group_id)

    def of_session(self, session_id: str) -> list[FeedbackRecord]:
        """Return the feedback on all answers of a session (conversation), oldest first."""
        groups = select(GROUPS.c.group_id).where(GROUPS.c.session_id == session_id)
        return self._rows(FEEDBACK.c.group_id.in_(groups))

    def in_state(self, state: FeedbackState) -> list[FeedbackRecord]:
        """Return all feedback that has this state, oldest first."""
        return self._rows(FEEDBACK.c.state == state.value)

    def other_values(self, row: FeedbackRecord, limit: int) -> list[float]:
        """Return at most `limit` values of other feedback of the same app, latest first. Feedback
        that the user took back or replaced is left out."""
        with self._read_engine.connect() as db:
            key = (row.app_key, row.group_id, row.feedback_id, limit)
            return list(db.exec_driver_sql(_OTHER_VALUES, key).scalars())

    def served_calls(self, group_id: str) -> ServedCalls:
        """Return the model calls that produced the served answer of a group (request). If the
        ledger has no calls for this answer, the list of calls is empty."""
        with self._read_engine.connect() as db:
            group = db.exec_driver_sql(
                "SELECT run_id, served_index FROM groups WHERE group_id = ?", (group_id,)
            ).one_or_none()
            run_id, served = (None, None) if group is None else group
            query = select(CALLS).where(CALLS.c.group_id == group_id, CALLS.c.sibling == served)
            rows = db.execute(query.order_by(CALLS.c.seq)).all()
        is_unshaped = all(row.shaped is not None and not row.shaped for row in rows)
        return ServedCalls(run_id, [reads.call_from_row(row) for row in rows], is_unshaped)

    def arm_of(self, group_id: str) -> str | None:
        """Return the arm of a group, or None if the group has no arm. An arm decides which weights
        answer a session."""
        return self._one("SELECT arm FROM group_rows WHERE group_id = ?", group_id)

    def counts(self) -> dict[str, int]:
        """Return the number of feedback items in each state."""
        with self._read_engine.connect() as db:
            return {state: num for state, num in db.exec_driver_sql(reads.NUMBERS, ("feedback",))}

    def _rows(self, where: Any) -> list[FeedbackRecord]:
        query = select(FEEDBACK).where(where).order_by(FEEDBACK.c.received_at)
        with self._read_engine.connect() as db:
            return [FeedbackRecord(**row) for row in db.execute(query).mappings()]

    def _one(self, query: str, *values: object) -> Any:
        with self._read_engine.connect() as db:
            return db.exec_driver_sql(query, values).scalar()


def _run(db: Connection, sql: str, row: tuple[Any, ...]) -> None:
    db.exec_driver_sql(sql, row)


def _record(db: Connection, row: FeedbackRecord) -> None:
    if is_forgotten(db, row.group_id):
        row = replace(row, edited=None, comment=None, reason=_slug(row.reason))
        if row.edit_state is not None:
            row = replace(row, edit_state=FeedbackState.DROPPED, edit_reason=FORGOTTEN)
    db.exec_driver_sql(_INSERT, _VALUES(row))


def _set_outcome(db: Connection, row: tuple[Any, ...], group_id: str) -> None:
    state, reason, *rest = row
    if is_forgotten(db, group_id):  # the details of a reason may quote an error message
        reason = _slug(reason)
    db.exec_driver_sql(_OUTCOME, (state, reason, *rest))


def _slug(reason: str | None) -> str | None:
    return None if reason is None else reason.partition(":")[0]
