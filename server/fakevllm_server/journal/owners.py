"""Whose episodes wait to be trained: with them a next life asks who agrees to its step."""

from __future__ import annotations

from sqlalchemy import Connection

from fakevllm_server.episodes import ID_CHARS
from fakevllm_server.journal.tables import GroupState


def clients_that_wait(db: Connection) -> list[str]:
    """Their uuids. Those that only aborted, and whose groups were all dropped, are not known."""
    ended_by = f"JOIN episodes e ON e.episode_id = substr(s.owner, 1, {ID_CHARS})"
    query = (
        f"SELECT e.client_uuid FROM samples s {ended_by} WHERE s.group_id IS NULL "
        "UNION SELECT e.client_uuid FROM groups g JOIN samples s ON s.group_id = g.group_id "
        f"{ended_by} WHERE g.state = ?"
    )
    return [row[0] for row in db.exec_driver_sql(query, (GroupState.POOLED,))]
