"""Delete old rows: replies to old requests, and groups that no checkpoint or client needs again.

The run's log stays complete. A few rows are deleted with each transaction, so that nobody waits for
it, but more than are added.
"""

from __future__ import annotations

from sqlalchemy import Connection

from fakevllm_server.episodes.registry import ID_CHARS
from fakevllm_server.journal import changes, reads
from fakevllm_server.journal.tables import EpisodeState, GroupState

KEEP_NEWEST = 100_000
"""Number of newest replies to keep, and of newest groups with their samples: about 250 bytes a
row."""
KEEP_REPLIES_S = 3600.0
"""Seconds for which a reply is kept, however many are newer. Clients repeat requests for minutes. A
proxy that was away for longer finds its replies among the newest."""
EVERY = 100
"""Number of changes between two rounds of deletion."""
PIECE = 400
"""Number of replies, and of groups, examined per round. It exceeds EVERY because a change adds at
most one of each."""


class Retention:
    """Deletes rows on the writer's thread, inside its transactions."""

    def __init__(self) -> None:
        self._num_changes = 0
        self._examined_seq = 0
        """Sequence number of the last group examined. A round continues behind it, so that groups
        which are unfinished or kept forever are not examined each time."""

    def run_after(self, db: Connection, num_changes: int, now: float) -> None:
        """Delete what is due after this number of changes, in their transaction.

        `now` is in Unix seconds.
        """
        self._num_changes += num_changes
        while self._num_changes >= EVERY:
            self._num_changes -= EVERY
            _delete_replies(db, now)
            self._delete_groups(db)

    def _delete_groups(self, db: Connection) -> None:
        newest = db.exec_driver_sql("SELECT COALESCE(MAX(seq), 0) FROM groups").scalar_one()
        query = (
            "SELECT seq, group_id, state, step, advantage FROM groups WHERE seq > ? AND seq <= ? "
            "ORDER BY seq LIMIT ?"
        )
        bounds = (self._examined_seq, newest - KEEP_NEWEST, PIECE)
        rows = db.exec_driver_sql(query, bounds).all()
        pruned = reads.last_pruned(db) if rows else 0
        for _, group_id, state, step, advantage in rows:
            is_trained = state == GroupState.CONSUMED and step <= pruned
            is_finished = is_trained or state in (GroupState.DROPPED, GroupState.EVAL)
            # A feedback sample carries its own calls: only its id shows that they were trained.
            if is_finished and advantage is None:
                _delete_group(db, group_id)
        self._examined_seq = rows[-1].seq if len(rows) == PIECE else 0  # else start over


def _delete_replies(db: Connection, now: float) -> None:
    """Delete old replies, and those from the future: the clock was wrong when they were written."""
    newest = db.exec_driver_sql("SELECT COALESCE(MAX(rowid), 0) FROM submissions").scalar_one()
    old = "SELECT rowid, at FROM submissions WHERE rowid <= ? ORDER BY rowid LIMIT ?"
    db.exec_driver_sql(
        f"DELETE FROM submissions WHERE rowid IN (SELECT rowid FROM ({old}) "
        "WHERE at < ? OR at > ?)",
        (newest - KEEP_NEWEST, PIECE, now - KEEP_REPLIES_S, now),
    )


def _delete_group(db: Connection, group_id: str) -> None:
    changes.delete_calls(db, [group_id])  # a remaining call would reopen the group
    db.exec_driver_sql(
        f"DELETE FROM episodes WHERE state = ? AND episode_id IN (SELECT substr(owner, 1, "
        f"{ID_CHARS}) FROM samples WHERE group_id = ? AND task_id IS NOT NULL)",
        (EpisodeState.ENDED, group_id),
    )
    for table in ("samples", "groups"):
        db.exec_driver_sql(f"DELETE FROM {table} WHERE group_id = ?", (group_id,))
