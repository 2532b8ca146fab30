"""The outcomes of users' edits: the columns `edit_state`, `edit_reason`, `edit_step` and
`edit_version` of the table `feedback`, and the queries on these columns. If a row also has a value,
the value is trained independently (see feedback_rows.py). The methods that read block the thread,
so do not call them on the event loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine

from fakevllm.ledger.feedback_rows import sample_outcomes
from fakevllm.ledger.forgotten_groups import is_forgotten
from fakevllm.ledger.records import FeedbackRecord, FeedbackState
from fakevllm.ledger.redacted_records import RecordRedactor
from fakevllm.ledger.writer import WriteReceipt
from fakevllm_adapters.protocol.swarm import LogEntry

_EDIT = "edit:"
"""Prefix of the ids of demonstrations that are made from edits."""
_SET_OUTCOME = """
    UPDATE feedback SET edit_state = ?, edit_reason = ?
    WHERE group_id = ? AND feedback_id = ? AND edit_state = 'waiting'
"""
_APPLY_LOG = """
    UPDATE feedback SET edit_state = ?, edit_reason = ?, edit_step = ?, edit_version = ?
    WHERE group_id = ? AND feedback_id = ? AND edit_state IS NOT NULL
"""
_VOID = """
    UPDATE feedback SET edit_state = 'kept', edit_reason = ?
    WHERE group_id = ? AND feedback_id <> ? AND edit_state = 'waiting'
"""
_WAITING = """
    SELECT f.group_id, f.feedback_id,
           CASE WHEN g.group_id IS NULL THEN f.received_at < ? ELSE g.state <> 'scored' END
    FROM feedback AS f LEFT JOIN group_rows AS g USING (group_id)
    WHERE f.edit_state = 'waiting' ORDER BY f.received_at
"""
_COUNTS = """
    SELECT edit_state, COUNT(*) FROM feedback WHERE edit_state IS NOT NULL GROUP BY edit_state
"""


def edit_name(group_id: str, feedback_id: str) -> str:
    """Return the id of the demonstrations that are made from the edit in this feedback."""
    return f"{_EDIT}{group_id}/{feedback_id}"


def apply_log_entry(db: Connection, entry: LogEntry) -> None:
    """Apply one entry of the server's run log to the edits. The entry says which demonstrations
    were trained, dropped or lost."""
    for row in sample_outcomes(entry, _EDIT):
        db.exec_driver_sql(_APPLY_LOG, row)


class EditRows:
    """Reads and writes the outcomes of users' edits in the ledger (the proxy's database)."""

    def __init__(
        self,
        read_engine: Engine,
        put: Callable[[Callable[[Connection], None]], WriteReceipt],
        redactor: RecordRedactor,
    ) -> None:
        """Create the object. `put` is the function that queues a change for the thread that writes
        the ledger (the proxy's database)."""
        self._read_engine = read_engine
        self._put = put
        self._redactor = redactor

    def set_outcome(
        self, row: FeedbackRecord, state: FeedbackState, reason: str | None = None
    ) -> WriteReceipt:
        """Set the outcome of an edit in the state `waiting`. An edit in any other state stays
        unchanged, for example because the user has taken the edit back or replaced it."""
        reason = None if reason is None else self._redactor.text(reason)
        values = (state.value, reason)
        return self._put(partial(_set_outcome, values=values, row=row))

    def void_earlier(self, row: FeedbackRecord, reason: str) -> WriteReceipt:
        """Mark the earlier edits of the same answer as void, because the user took them back or
        replaced them with the feedback `row`. Edits that were sent already stay unchanged."""
        values = (reason, row.group_id, row.feedback_id)
        return self._put(lambda db: _run(db, _VOID, values))

    def waiting(self, started_at: float) -> list[tuple[str, str, bool]]:
        """Return the edits that wait to be sent to the server, oldest first. Each item is a triple
        (group id, feedback id, is_settled). A group is a request with its answers. `is_settled` is
        False if the server has not acknowledged the group's rewards yet. It is also False if the
        group is not in the ledger (the proxy's database) yet.

        `started_at` is the start of this proxy process, in Unix seconds. A group that an earlier
        process has not written will never be in the ledger, and counts as settled.
        """
        with self._read_engine.connect() as db:
            rows = db.exec_driver_sql(_WAITING, (started_at,)).all()
        return [(group_id, name, bool(is_settled)) for group_id, name, is_settled in rows]

    def counts(self) -> dict[str, int]:
        """Return the number of edits in each state. An edit has no state if edits were not trained
        when it arrived."""
        with self._read_engine.connect() as db:
            return {state: num for state, num in db.exec_driver_sql(_COUNTS)}


def _set_outcome(db: Connection, values: tuple[str, str | None], row: FeedbackRecord) -> None:
    state, reason = values
    if reason is not None and is_forgotten(db, row.group_id):
        reason = reason.partition(":")[0]  # the details may quote an error message
    _run(db, _SET_OUTCOME, (state, reason, row.group_id, row.feedback_id))


def _run(db: Connection, sql: str, values: tuple[Any, ...]) -> None:
    db.exec_driver_sql(sql, values)
