"""Delete old rows of the journal. These are replies to old requests, and groups that no checkpoint
and no client will need again.

The run log stays complete. Rows are deleted in small rounds, so that no request has to wait long
for a round. Each round examines more rows than were added since the previous round, so the deletion
keeps up with the additions.
"""

from __future__ import annotations

from sqlalchemy import Connection

from fakevllm_server.episodes.episode_registry import ID_CHARS
from fakevllm_server.journal import reads, row_changes
from fakevllm_server.journal.tables import EpisodeState, GroupState

KEEP_NEWEST = 100_000
"""This number of the newest replies is always kept, and the same number of the newest groups, with
their samples. A row has about 250 bytes."""
KEEP_REPLIES_S = 3600.0
"""Seconds for which every reply is kept. Clients repeat a request for some minutes. For a proxy
that was stopped for longer, the KEEP_NEWEST newest replies are kept whatever their age is."""
CHANGES_PER_ROUND = 100
"""Number of changes between two rounds of deletion."""
ROWS_PER_ROUND = 400
"""Number of replies that a round examines, and number of groups. A change adds at most one reply
and one group. The number is larger than CHANGES_PER_ROUND, so that the deletion keeps up."""


class Retention:
    """Deletes old rows of the journal, inside the transactions of the thread that writes it."""

    def __init__(self) -> None:
        self._num_changes = 0
        self._examined_seq = 0
        """Sequence number of the last group that was examined. The next round continues behind this
        group, so that groups that must be kept are not examined in each round."""

    def run_after(self, db: Connection, num_changes: int, now: float) -> None:
        """Count the changes of a transaction. If enough changes have accumulated, delete old rows
        in the same transaction.

        `now` is in Unix seconds.
        """
        self._num_changes += num_changes
        while self._num_changes >= CHANGES_PER_ROUND:
            self._num_changes -= CHANGES_PER_ROUND
            _delete_replies(db, now)
            self._delete_groups(db)

    def _delete_groups(self, db: Connection) -> None:
        newest = db.exec_driver_sql("SELECT COALESCE(MAX(seq), 0) FROM groups").scalar_one()
        query = (
            "SELECT seq, group_id, state, step, "
            "advantage IS NOT NULL OR demonstrates IS NOT NULL OR is_logged "
            "FROM groups WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
        )
        bounds = (self._examined_seq, newest - KEEP_NEWEST, ROWS_PER_ROUND)
        rows = db.exec_driver_sql(query, bounds).all()
        pruned = reads.last_pruned(db) if rows else 0
        for _, group_id, state, step, has_own_calls in rows:
            is_trained = state == GroupState.CONSUMED and step <= pruned
            is_finished = is_trained or state in (GroupState.DROPPED, GroupState.EVAL)
            # Requests for feedback samples, users' edits and logged groups have the calls: only
            # the ids show that they were trained.
            if is_finished and not has_own_calls:
                _delete_group(db, group_id)
        is_end = len(rows) < ROWS_PER_ROUND
        self._examined_seq = 0 if is_end else rows[-1].seq


def _delete_replies(db: Connection, now: float) -> None:
    """Delete old replies, and replies with a time in the future (a clock was wrong)."""
    newest = db.exec_driver_sql("SELECT COALESCE(MAX(rowid), 0) FROM submissions").scalar_one()
    old = "SELECT rowid, at FROM submissions WHERE rowid <= ? ORDER BY rowid LIMIT ?"
    db.exec_driver_sql(
        f"DELETE FROM submissions WHERE rowid IN (SELECT rowid FROM ({old}) "
        "WHERE at < ? OR at > ?)",
        (newest - KEEP_NEWEST, ROWS_PER_ROUND, now - KEEP_REPLIES_S, now),
    )


def _delete_group(db: Connection, group_id: str) -> None:
    row_changes.delete_calls(db, [group_id])  # a remaining call would reopen the group
    db.exec_driver_sql(
        f"DELETE FROM episodes WHERE state = ? AND episode_id IN (SELECT substr(owner, 1, "
        f"{ID_CHARS}) FROM samples WHERE group_id = ? AND task_id IS NOT NULL)",
        (EpisodeState.ENDED, group_id),
    )
    for table in ("samples", "groups"):
        db.exec_driver_sql(f"DELETE FROM {table} WHERE group_id = ?", (group_id,))
