"""Sessions as the ledger knows them: for the tree's next life, for the terminal, for what followed
an answer. Reads block: call them off the event loop."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Engine

from fakevllm.sessions.types import Evidence, Kept, Kind, Place

_KEPT = """
    SELECT g.group_id, g.app_key, g.received_at, g.session_id, g.parent_session_id, g.parent_id,
           g.turn, g.kind, g.evidence, g.asked_key, g.response_id, s.message_json
    FROM (SELECT received_at, group_id, app_key, session_id, parent_session_id, parent_id, turn,
                 kind, evidence, asked_key, response_id
          FROM groups INDEXED BY ix_groups_place
          WHERE session_id IS NOT NULL ORDER BY received_at DESC LIMIT ?) AS g
    LEFT JOIN siblings AS s ON s.group_id = g.group_id AND s.served
        AND NOT EXISTS (SELECT 1 FROM kept_answers AS k WHERE k.group_id = g.group_id)
    ORDER BY g.received_at, g.group_id
"""
_SESSIONS = """
    WITH latest AS (
        SELECT session_id, MAX(parent_session_id) AS parent, MAX(app_key) AS app_key,
               MAX(turn) AS turns, COUNT(*) AS num, MAX(received_at) AS seen_at
        FROM groups WHERE session_id IS NOT NULL
        GROUP BY session_id ORDER BY seen_at DESC, session_id LIMIT ?
    )
    SELECT l.session_id, l.parent, l.app_key, l.turns, l.num, l.seen_at,
           (SELECT AVG(s.reward) FROM groups AS g JOIN siblings AS s USING (group_id)
            WHERE g.session_id = l.session_id AND s.served),
           COALESCE((SELECT question FROM groups AS g WHERE g.session_id = l.session_id
                     ORDER BY g.kind = 'side', g.received_at LIMIT 1), '')
    FROM latest AS l ORDER BY l.seen_at DESC, l.session_id
"""
_GROUPS = """
    SELECT g.group_id, g.parent_id, g.turn, g.kind, g.evidence, g.received_at, g.question,
           g.num_siblings, s.reward, g.state, g.reason, g.app_key, g.parent_session_id
    FROM groups AS g LEFT JOIN siblings AS s ON s.group_id = g.group_id AND s.served
    WHERE g.session_id = ? ORDER BY g.received_at, g.group_id
"""
_STARTED = """
    SELECT session_id, MIN(parent_id) FROM groups WHERE parent_session_id = ?
    GROUP BY session_id ORDER BY MIN(received_at)
"""
_BEGINNING = """
    SELECT DISTINCT session_id FROM groups WHERE session_id >= ? AND session_id < ?
    ORDER BY session_id LIMIT 2
"""
_FOLLOWED = """
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
    session_id: str
    parent_session_id: str | None
    app_key: str | None
    turns: int
    num_groups: int
    seen_at: float
    """Unix seconds."""
    reward: float | None
    """Mean of what was served."""
    question: str
    """The first."""


@dataclass(frozen=True, slots=True)
class PlacedGroup:
    group_id: str
    parent_id: str | None
    turn: int
    kind: str
    evidence: str
    received_at: float
    question: str
    num_siblings: int
    reward: float | None
    """Of the served sibling."""
    state: str
    reason: str | None
    app_key: str | None
    parent_session_id: str | None


@dataclass(frozen=True, slots=True)
class Followed:
    """A request that says something of an earlier answer.

    >>> Followed("g2", "regenerates", False, "And now?", 7.0).is_new_turn
    False
    """

    group_id: str
    kind: str
    is_new_turn: bool
    """Whether somebody wrote something next, and no tool's result went back."""
    question: str
    received_at: float


class SessionReads:
    def __init__(self, reading: Engine) -> None:
        self._reading = reading

    def kept(self, limit: int) -> list[Kept]:
        """The latest groups, oldest first."""
        with self._reading.connect() as db:
            rows = db.exec_driver_sql(_KEPT, (limit,)).all()
        return [
            Kept(
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
        """The one seen last comes first."""
        with self._reading.connect() as db:
            return [SessionRow(*row) for row in db.exec_driver_sql(_SESSIONS, (limit,))]

    def groups(self, session_id: str) -> list[PlacedGroup]:
        """Oldest first."""
        with self._reading.connect() as db:
            return [PlacedGroup(*row) for row in db.exec_driver_sql(_GROUPS, (session_id,))]

    def started(self, session_id: str) -> list[tuple[str, str | None]]:
        """Sessions that this one started, and the group each was started from."""
        with self._reading.connect() as db:
            return [(row[0], row[1]) for row in db.exec_driver_sql(_STARTED, (session_id,))]

    def beginning(self, text: str) -> list[str]:
        """Ids of sessions that begin so, two at most."""
        with self._reading.connect() as db:
            rows = db.exec_driver_sql(_BEGINNING, (text, text + "\x7f")).all()
        return [row[0] for row in rows]

    def followed(self, group_id: str) -> list[Followed]:
        """What came after a group's answer, oldest first: the next message, an edit, another try.
        Signals of what the answer was worth."""
        with self._reading.connect() as db:
            rows = db.exec_driver_sql(_FOLLOWED, (group_id,)).all()
        return [Followed(row[0], row[1], bool(row[2]), row[3], row[4]) for row in rows]
