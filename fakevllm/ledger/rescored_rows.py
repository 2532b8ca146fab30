"""Read and write the table `rescored`. The table has the new rewards of logged answers that were
scored again by other hooks (the user's reward functions).

The content hash of the hook files is part of the table's key. Therefore the table can have the
results of several versions of the hooks. The original rewards stay in the table `siblings`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import orjson
from sqlalchemy import Connection, Engine

from fakevllm.ledger.forgotten_groups import is_forgotten
from fakevllm.ledger.redacted_records import RecordRedactor
from fakevllm.ledger.writer import WriteReceipt

_READ = """
    SELECT "index", reward, reason FROM rescored WHERE group_id = ? AND hook_hash = ?
    ORDER BY "index"
"""
_DELETE = "DELETE FROM rescored WHERE group_id = ? AND hook_hash = ?"
_INSERT = """
    INSERT INTO rescored (group_id, hook_hash, "index", reward, annotations_json, reason, scored_at)
    VALUES (?, ?, ?, ?, ?, ?, ?)
"""


@dataclass(frozen=True, slots=True)
class RescoredSibling:
    """The new result for one sibling (an answer to a request) that was scored again by other
    hooks."""

    index: int
    """Index of the sibling in its group."""
    reward: float | None
    annotations: dict[str, object]
    """Keys that the hook added to the answer."""


@dataclass(frozen=True, slots=True)
class RescoredRow:
    """The new result for one group (a request with its siblings) that was scored again by other
    hooks."""

    group_id: str
    hook_hash: str
    siblings: Sequence[RescoredSibling]
    reason: str | None
    """Reason why the hooks failed; None if they did not fail."""
    scored_at: float
    """Time at which the hooks scored the group, in Unix seconds."""


class RescoredRows:
    """Reader and writer of the table `rescored`."""

    def __init__(
        self,
        read_engine: Engine,
        put: Callable[[Callable[[Connection], None]], WriteReceipt],
        redactor: RecordRedactor,
    ) -> None:
        """Create the reader and writer. `put` is a function that queues a change for the thread
        that writes the ledger."""
        self._read_engine = read_engine
        self._put = put
        self._redactor = redactor

    def find(self, group_id: str, hook_hash: str) -> tuple[dict[int, float | None], str | None]:
        """Return the rewards of a group by sibling index, and the reason why the hooks failed, or
        None. The rewards are those from the hooks with the hash `hook_hash`. If the table has no
        result of these hooks for the group, return ({}, None). This method blocks the thread."""
        with self._read_engine.connect() as db:
            rows = db.exec_driver_sql(_READ, (group_id, hook_hash)).all()
        return {row[0]: row[1] for row in rows}, rows[0][2] if rows else None

    def put(self, row: RescoredRow) -> WriteReceipt:
        """Queue the new result for one group to be written. It replaces an earlier result for this
        group from hooks with the same hash."""
        return self._put(partial(_write, row=row, redactor=self._redactor))


def _write(db: Connection, row: RescoredRow, redactor: RecordRedactor) -> None:
    """Write the result for one group, redacted. If the group was forgotten (its texts were
    deleted), write only the rewards and the short name of the reason why the hooks failed. The
    annotations and the rest of the reason may quote the group's texts."""
    is_kept = not is_forgotten(db, row.group_id)
    reason = row.reason
    if reason is not None:
        reason = redactor.text(reason) if is_kept else reason.partition(":")[0]
    db.exec_driver_sql(_DELETE, (row.group_id, row.hook_hash))
    for sibling in row.siblings:
        notes = None
        if sibling.annotations and is_kept:
            notes = redactor.json_text(orjson.dumps(sibling.annotations).decode())
        values = (sibling.index, sibling.reward, notes, reason, row.scored_at)
        db.exec_driver_sql(_INSERT, (row.group_id, row.hook_hash, *values))
