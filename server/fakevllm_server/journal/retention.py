"""What the journal forgets: the replies to what was acknowledged long ago, and the rows of groups
that no checkpoint and no client needs again. The run's log stays whole.

A few rows with each transaction, so that nobody waits for it, and more than are added.
"""

from __future__ import annotations

from sqlalchemy import Connection

from fakevllm_server.episodes.registry import ID_CHARS
from fakevllm_server.journal import changes, reads
from fakevllm_server.journal.tables import EpisodeState, GroupState

KEEP_NEWEST = 100_000
"""Replies, and groups with all that is in them: some 250 bytes a row."""
KEEP_REPLIES_S = 3600.0
"""However many are newer. Clients send again for minutes; a proxy that was away for longer finds
its replies among the newest."""
EVERY = 100
"""Changes between two pieces of this work."""
PIECE = 400
"""Replies, and groups, that are looked at in one: of a change comes one at most."""


class Retention:
    """For the one thread that writes."""

    def __init__(self) -> None:
        self._num_changes = 0
        self._looked_at = 0
        """The place of the last group that was looked at: what is not at rest yet, or kept for
        ever, must not be looked at each time."""

    def after(self, db: Connection, num_changes: int, now: float) -> None:
        """In the transaction of so many changes; `now` in Unix seconds."""
        self._num_changes += num_changes
        while self._num_changes >= EVERY:
            self._num_changes -= EVERY
            _forget_replies(db, now)
            self._forget_groups(db)

    def _forget_groups(self, db: Connection) -> None:
        newest = db.exec_driver_sql("SELECT COALESCE(MAX(seq), 0) FROM groups").scalar_one()
        query = (
            "SELECT seq, group_id, state, step, advantage FROM groups WHERE seq > ? AND seq <= ? "
            "ORDER BY seq LIMIT ?"
        )
        bounds = (self._looked_at, newest - KEEP_NEWEST, PIECE)
        found = db.exec_driver_sql(query, bounds).all()
        pruned = reads.last_pruned(db) if found else 0
        for _, group_id, state, step, advantage in found:
            is_trained = state == GroupState.CONSUMED and step <= pruned
            is_at_rest = is_trained or state in (GroupState.DROPPED, GroupState.EVAL)
            # A feedback sample brings its calls: only its name tells that they were trained.
            if is_at_rest and advantage is None:
                _forget_group(db, group_id)
        self._looked_at = found[-1].seq if len(found) == PIECE else 0  # and round again


def _forget_replies(db: Connection, now: float) -> None:
    """Those from the future too: the clock was wrong."""
    newest = db.exec_driver_sql("SELECT COALESCE(MAX(rowid), 0) FROM submissions").scalar_one()
    old = "SELECT rowid, at FROM submissions WHERE rowid <= ? ORDER BY rowid LIMIT ?"
    db.exec_driver_sql(
        f"DELETE FROM submissions WHERE rowid IN (SELECT rowid FROM ({old}) "
        "WHERE at < ? OR at > ?)",
        (newest - KEEP_NEWEST, PIECE, now - KEEP_REPLIES_S, now),
    )


def _forget_group(db: Connection, group_id: str) -> None:
    changes.forget_calls(db, [group_id])  # one that was left would open the group again
    db.exec_driver_sql(
        f"DELETE FROM episodes WHERE state = ? AND episode_id IN (SELECT substr(owner, 1, "
        f"{ID_CHARS}) FROM samples WHERE group_id = ? AND task_id IS NOT NULL)",
        (EpisodeState.ENDED, group_id),
    )
    for table in ("samples", "groups"):
        db.exec_driver_sql(f"DELETE FROM {table} WHERE group_id = ?", (group_id,))
