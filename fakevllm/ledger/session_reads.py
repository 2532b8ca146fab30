"""Queries about sessions (conversations of apps). These queries restore the session tree after a
restart, list sessions, and find the requests that follow an answer.

The methods block the thread, so do not call them on the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Engine

from fakevllm.sessions.types import Evidence, Kind, Place, PlacedRequest

_PLACED = """
    SELECT g.group_id, g.app_key, g.received_at, g.session_id, g.parent_session_id, g.parent_id,
           g.turn, g.kind, g.evidence, g.asked_key, g.response_id, s.message_json
    FROM (SELECT received_at, group_id, app_key, session_id, parent_session_id, parent_id, turn,
                 kind, evidence, asked_key, response_id
          FROM group_rows INDEXED BY ix_groups_place
          WHERE session_id IS NOT NULL ORDER BY received_at DESC LIMIT ?) AS g
    LEFT JOIN siblings AS s ON s.group_id = g.group_id AND s.served
        AND NOT EXISTS (SELECT 1 FROM kept_answers AS k WHERE k.group_id = g.group_id)
    ORDER BY g.received_at, g.group_id
"""
_SESSIONS = """
    SELECT c.session_id, c.parent_session_id, c.app_key, c.turns, c.num_groups, c.seen_at,
           c.reward_sum / NULLIF(c.num_rewards, 0), COALESCE(g.question, ''),
           CASE WHEN g.arm_propensity IS NOT NULL THEN g.arm END
    FROM (SELECT * FROM session_counters ORDER BY seen_at DESC, session_id LIMIT ?) AS c
    LEFT JOIN groups AS g ON g.group_id = c.first_group_id
    ORDER BY c.seen_at DESC, c.session_id
"""
_GROUPS = """
    SELECT g.group_id, g.parent_id, g.turn, g.kind, g.evidence, g.received_at, g.question,
           g.num_siblings, s.reward, g.state, g.reason, g.app_key, g.parent_session_id, g.arm
    FROM groups AS g LEFT JOIN siblings AS s ON s.group_id = g.group_id AND s.served
    WHERE g.session_id = ? ORDER BY g.received_at, g.group_id
"""
_LATEST_GROUPS = """
    SELECT g.group_id, g.parent_id, g.turn, g.kind, g.evidence, g.received_at,
           substr(g.question, 1, 300),
           g.num_siblings, s.reward, g.state, g.reason, g.app_key, g.parent_session_id, g.arm
    FROM (SELECT * FROM group_rows WHERE session_id = ?
          ORDER BY received_at DESC, group_id DESC LIMIT ?) AS g
    LEFT JOIN sibling_rows AS s ON s.group_id = g.group_id AND s.served
    ORDER BY g.received_at DESC, g.group_id DESC
"""
_CHILDREN = """
    SELECT session_id, MIN(parent_id) FROM groups WHERE parent_session_id = ?
    GROUP BY session_id ORDER BY MIN(received_at)
"""
_WITH_PREFIX = """
    SELECT session_id FROM session_counters WHERE session_id >= ? AND session_id < ?
    ORDER BY session_id LIMIT 2
"""
_FOLLOW_UPS = """
    SELECT b.group_id, b.kind, b.turn > a.turn, b.question, b.received_at
    FROM groups AS a JOIN groups AS b ON b.session_id = a.session_id
    WHERE a.group_id = ? AND b.group_id <> a.group_id AND b.kind <> 'side' AND (
        b.parent_id = a.group_id OR (
            b.kind = 'regenerates' AND b.asked_key = a.asked_key AND b.received_at > a.received_at
        )
    ) ORDER BY b.received_at, b.group_id
"""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One session in a list of sessions."""

    session_id: str
    parent_session_id: str | None
    app_key: str | None
    turns: int
    num_groups: int
    seen_at: float
    """Time of the latest request, in Unix seconds."""
    reward: float | None
    """Mean reward of the served answers."""
    question: str
    """The first question of the session."""
    arm: str | None = None
    """Arm that the session was assigned to. None if sessions are not assigned to arms. Also None if
    the arm's version of the weights could not answer the first request."""


@dataclass(frozen=True, slots=True)
class SessionGroup:
    """A group (a request with its sampled answers) of a session, with its position in the
    conversation."""

    group_id: str
    parent_id: str | None
    turn: int
    kind: str
    evidence: str
    received_at: float
    question: str
    num_siblings: int
    reward: float | None
    """Reward of the served answer."""
    state: str
    reason: str | None
    app_key: str | None
    parent_session_id: str | None
    arm: str | None = None
    """Arm whose version of the weights answered. None if sessions are not assigned to arms."""


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A request that follows an earlier answer, and may show how useful that answer was.

    >>> FollowUp("g2", "regenerates", False, "And now?", 7.0).is_new_turn
    False
    """

    group_id: str
    kind: str
    is_new_turn: bool
    """Whether the request begins a new turn, with a new message of the user. False if the request
    adds only a tool's result, or regenerates the answer."""
    question: str
    received_at: float


class SessionReads:
    """A reader of sessions (conversations of apps) from the ledger."""

    def __init__(self, read_engine: Engine) -> None:
        self._read_engine = read_engine

    def latest_requests(self, limit: int) -> list[PlacedRequest]:
        """Return the latest requests of all sessions together, oldest first, and at most `limit` of
        them. Requests without a session are left out."""
        with self._read_engine.connect() as db:
            rows = db.exec_driver_sql(_PLACED, (limit,)).all()
        return [
            PlacedRequest(
                group_id=row[0],
                scope=row[1] or "",
                received_at=row[2],
                place=Place(
                    session_id=row[3],
                    parent_session_id=row[4],
                    parent_id=row[5],
                    turn=row[6],
                    kind=Kind(row[7]),
                    evidence=Evidence(row[8]),
                    asked_key=row[9] or "",
                ),
                response_id=row[10],
                message_json=row[11],
            )
            for row in rows
        ]

    def latest(self, limit: int) -> list[SessionRow]:
        """Return the sessions (conversations of apps) with the latest requests, and at most `limit`
        of them. The session with the latest request comes first."""
        with self._read_engine.connect() as db:
            return [SessionRow(*row) for row in db.exec_driver_sql(_SESSIONS, (limit,))]

    def groups(self, session_id: str) -> list[SessionGroup]:
        """Return the groups (requests with their sampled answers) of a session, oldest first."""
        with self._read_engine.connect() as db:
            return [SessionGroup(*row) for row in db.exec_driver_sql(_GROUPS, (session_id,))]

    def latest_groups(self, session_id: str, limit: int) -> list[SessionGroup]:
        """Return the latest groups of a session, newest first, and at most `limit` of them. The
        questions are cut off after 300 characters."""
        with self._read_engine.connect() as db:
            rows = db.exec_driver_sql(_LATEST_GROUPS, (session_id, limit))
            return [SessionGroup(*row) for row in rows]

    def children(self, session_id: str) -> list[tuple[str, str | None]]:
        """Return the sub-agents that this session (conversation) started.

        Each item is a pair of ids. The first id is that of the sub-agent's own session. The second
        id is that of the group (request) that started the sub-agent, or None.
        """
        with self._read_engine.connect() as db:
            return [(row[0], row[1]) for row in db.exec_driver_sql(_CHILDREN, (session_id,))]

    def ids_with_prefix(self, prefix: str) -> list[str]:
        """Return the ids of at most two sessions whose ids begin with `prefix`.

        Two ids are enough to show that the prefix is ambiguous.
        """
        with self._read_engine.connect() as db:
            rows = db.exec_driver_sql(_WITH_PREFIX, (prefix, prefix + "\x7f")).all()
        return [row[0] for row in rows]

    def follow_ups(self, group_id: str) -> list[FollowUp]:
        """Return the requests that follow the answer to the request `group_id`, oldest first. A
        request follows an answer in three cases: it continues the conversation after the answer, it
        edits a later part of the conversation, or it regenerates the answer."""
        with self._read_engine.connect() as db:
            rows = db.exec_driver_sql(_FOLLOW_UPS, (group_id,)).all()
        return [FollowUp(row[0], row[1], bool(row[2]), row[3], row[4]) for row in rows]
