"""Queries for the scored groups (requests with their sampled answers) of sessions that were
assigned to arms. An arm decides which version of the weights answers a session (release/arms.py).

The methods block the thread, so do not call them on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Engine

from fakevllm.release.arm_gains import GroupOutcome
from fakevllm.release.arms import Arm
from fakevllm.sessions.tree import MAX_DEPTH

_NEWEST = "SELECT COALESCE(MAX(rowid), 0) FROM group_rows"
_SCORED = """
    SELECT g.group_id, g.session_id, g.arm, g.received_at,
           AVG(CASE WHEN NOT (g.served_by IS 'greedy' AND s."index" = 0) THEN s.reward END) AS mean,
           MAX(CASE WHEN s.served THEN s.reward END), MIN(s.reward), MAX(s.reward)
    FROM (SELECT group_id, session_id, arm, received_at, served_by, served_index
          FROM group_rows INDEXED BY ix_groups_arm
          WHERE arm_propensity IS NOT NULL AND rowid <= ?) AS g
    JOIN sibling_rows AS s USING (group_id)
    WHERE s.reward IS NOT NULL AND g.served_index IS NOT NULL
    GROUP BY g.group_id HAVING COUNT(*) >= 2 AND mean IS NOT NULL
    ORDER BY g.received_at, g.group_id
"""
_PARENTS = """
    SELECT DISTINCT session_id, parent_session_id FROM group_rows INDEXED BY ix_groups_arm
    WHERE arm_propensity IS NOT NULL AND rowid <= ? AND parent_session_id IS NOT NULL
"""


class ArmReads:
    """A reader of the scored groups of each arm. An arm decides which weights answer a session."""

    def __init__(self, read_engine: Engine) -> None:
        self._read_engine = read_engine

    def newest_row(self) -> int:
        """Return the row number of the newest group. Groups that are written later have higher row
        numbers."""
        with self._read_engine.connect() as db:
            return db.exec_driver_sql(_NEWEST).scalar_one()

    def outcomes(self, newest_row: int) -> Iterator[GroupOutcome]:
        """Yield the outcome of each scored group whose session was assigned to an arm, in the order
        in which the groups' requests arrived. Only groups with at least two rewards count.
        `newest_row` is the row number of the last group to read."""
        with self._read_engine.connect() as db:
            # Sessions without a scored group are read too: they may be ancestors of other sessions.
            rows = db.exec_driver_sql(_PARENTS, (newest_row,))
            parents: dict[str, str] = {session_id: parent_id for session_id, parent_id in rows}
            for row in db.exec_driver_sql(_SCORED, (newest_row,)):
                group_id, session_id, arm, received_at, *rewards = row
                root = group_id if session_id is None else _root_of(session_id, parents)
                yield GroupOutcome(root, Arm(arm), received_at, *rewards)


def _root_of(session_id: str, parents: dict[str, str]) -> str:
    for _ in range(MAX_DEPTH):
        parent_id = parents.get(session_id)
        if parent_id is None:
            break
        session_id = parent_id
    return session_id
