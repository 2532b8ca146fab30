"""Queries about groups: one whole group, its feedback, and a search with pages.

A group is a request with the answers (siblings) that were sampled for it. The methods block the
thread, so do not call them on the event loop.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine, select

from fakevllm.ledger.records import EVAL_KIND, FeedbackRecord, GroupRecord, SiblingRecord
from fakevllm.ledger.tables import FEEDBACK, GROUPS, SIBLINGS

ROWS_PER_SCAN = 5_000
"""Number of groups that one query of a search reads. A query holds a read transaction, and a long
read transaction keeps SQLite from truncating the write-ahead log."""
MAX_SCANNED_ROWS = 100_000
"""Maximum number of groups that one call of a search reads. A search that finds little in this
number of groups returns a key at which the caller may go on."""
MAX_SEARCH_S = 5.0
"""Seconds after which a search begins no further query, but returns a key at which the caller may
go on. The limit is below READ_TIMEOUT_S of a read-only ledger, after which a page shows nothing."""
MAX_FEEDBACK = 100
"""Maximum number of feedback items that are returned for one group."""
QUESTION_CHARS = 300
"""Number of characters of a question that a search returns."""

GroupKey = tuple[float, str]
"""A group's place in the order of the ledger: the time of the request, and the group's id."""
NEWEST: GroupKey = (math.inf, "")
"""The key after which a search for the newest groups begins."""
_END_OF_SCAN = """
    SELECT received_at, group_id FROM group_rows INDEXED BY ix_groups_place
    WHERE (received_at, group_id) < (?, ?)
    ORDER BY received_at DESC, group_id DESC LIMIT 1 OFFSET ?
"""
_REWARDS = "FROM sibling_rows AS s WHERE s.group_id = g.group_id"
_PAGE = f"""
    SELECT g.group_id, g.received_at, substr(g.question, 1, {QUESTION_CHARS}), g.state, g.reason,
           g.num_siblings, g.status, g.session_id, g.app_key, g.hook_hash, g.trained_step,
           (SELECT reward {_REWARDS} AND s.served), (SELECT MIN(reward) {_REWARDS}),
           (SELECT MAX(reward) {_REWARDS})
    FROM group_rows AS g INDEXED BY ix_groups_place
    WHERE (g.received_at, g.group_id) < (?, ?) AND (g.received_at, g.group_id) >= (?, ?)
    AND g.kind IS NOT '{EVAL_KIND}' {{conditions}}
    ORDER BY g.received_at DESC, g.group_id DESC LIMIT ?
"""
_UNRATED = """
    g.served_index IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM feedback AS f
                    WHERE f.group_id = g.group_id AND f.kind = 'feedback')
    AND NOT EXISTS (SELECT 1 FROM forgotten_groups AS o WHERE o.group_id = g.group_id)
"""
_APPS_SINCE = f"""
    SELECT app_key, COUNT(*), MAX(received_at) FROM (
        SELECT app_key, received_at FROM group_rows INDEXED BY ix_groups_place
        WHERE received_at >= ? AND kind IS NOT '{EVAL_KIND}'
        ORDER BY received_at DESC LIMIT ?
    ) GROUP BY app_key ORDER BY 2 DESC, 3 DESC
"""
_NUM_SINCE = """
    SELECT COUNT(*) FROM (
        SELECT 1 FROM group_rows INDEXED BY ix_groups_place WHERE received_at >= ? LIMIT ?
    )
"""


@dataclass(frozen=True, slots=True)
class AppTraffic:
    """The latest requests of one app."""

    app_key: str | None
    """Fingerprint of the app's API key; None or empty for requests without a key."""
    num_requests: int
    latest_at: float
    """Time of the latest request, in Unix seconds."""


@dataclass(frozen=True, slots=True)
class GroupSearch:
    """The conditions of a search. A condition that is None or empty is left out.

    >>> GroupSearch(state="trained").is_empty
    False
    """

    text: str = ""
    """Text in the question or in an answer, or the beginning of a group's id. Upper and lower case
    of ASCII letters are equal."""
    state: str = ""
    """A `State`."""
    min_reward: float | None = None
    max_reward: float | None = None
    """Limits for a reward. A group matches if at least one of its answers has such a reward."""
    hook: str = ""
    """Beginning of the digest of the hook files."""
    session: str = ""
    """Beginning of a session's id."""
    is_unrated: bool = False
    """Whether only groups match whose answer an app received, and about which nobody has sent
    feedback. Groups whose contents were deleted do not match."""

    @property
    def is_empty(self) -> bool:
        return self == GroupSearch()

    def sql(self) -> tuple[str, list[object]]:
        """Return the conditions as SQL on the table `group_rows AS g`, and their values."""
        conditions: list[str] = []
        values: list[object] = []
        if self.state:
            conditions.append("g.state = ?")
            values.append(self.state)
        for column, prefix in (("g.hook_hash", self.hook), ("g.session_id", self.session)):
            if prefix:
                conditions.append(f"substr({column}, 1, length(?)) = ?")
                values += [prefix, prefix]
        if self.min_reward is not None or self.max_reward is not None:
            low = -math.inf if self.min_reward is None else self.min_reward
            high = math.inf if self.max_reward is None else self.max_reward
            conditions.append(f"EXISTS (SELECT 1 {_REWARDS} AND s.reward BETWEEN ? AND ?)")
            values += [low, high]
        if self.is_unrated:
            conditions.append(_UNRATED)
        if self.text:
            # LIKE would be simpler. But one LIKE can take minutes for an answer that repeats the
            # text's beginning, and SQLite cannot interrupt it.
            conditions.append(
                "(instr(lower(g.question), lower(?)) OR substr(g.group_id, 1, length(?)) = ? "
                f"OR EXISTS (SELECT 1 {_REWARDS} AND instr(lower(s.text), lower(?))))"
            )
            values += [self.text] * 4
        return "".join(f" AND {condition}" for condition in conditions), values


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group in a list of groups."""

    group_id: str
    received_at: float
    question: str
    """The first characters of the question."""
    state: str
    reason: str | None
    num_siblings: int
    status: int
    session_id: str | None
    app_key: str | None
    hook_hash: str | None
    trained_step: int | None
    served_reward: float | None
    min_reward: float | None
    max_reward: float | None

    @property
    def key(self) -> GroupKey:
        return self.received_at, self.group_id


@dataclass(frozen=True, slots=True)
class GroupPage:
    """The result of a search: some groups, newest first."""

    rows: list[GroupRow] = field(default_factory=list[GroupRow])
    next_key: GroupKey | None = None
    """Key after which the search goes on. None if there are no older groups."""
    is_cut: bool = False
    """Whether the search ended early, because it had read MAX_SCANNED_ROWS groups or had taken
    MAX_SEARCH_S seconds."""


class GroupReads:
    """A reader of groups from the ledger."""

    def __init__(self, read_engine: Engine) -> None:
        self._read_engine = read_engine

    def group(self, group_id: str) -> GroupRecord | None:
        """Return the group with this id: a request with its siblings (sampled answers), in the
        order of their indices. Return None if the ledger does not have the group."""
        group_query = select(GROUPS).where(GROUPS.c.group_id == group_id)
        of_group = select(SIBLINGS).where(SIBLINGS.c.group_id == group_id)
        with self._read_engine.connect() as db:
            row = db.execute(group_query).mappings().one_or_none()
            rows = db.execute(of_group.order_by(SIBLINGS.c.index)).mappings()
            siblings = [_sibling(sibling_row) for sibling_row in rows]
        return None if row is None else GroupRecord(**row, siblings=siblings)

    def feedback(self, group_id: str) -> list[FeedbackRecord]:
        """Return the feedback on the answer of a group, oldest first, and at most MAX_FEEDBACK
        items."""
        query = select(FEEDBACK).where(FEEDBACK.c.group_id == group_id)
        query = query.order_by(FEEDBACK.c.received_at).limit(MAX_FEEDBACK)
        with self._read_engine.connect() as db:
            return [FeedbackRecord(**row) for row in db.execute(query).mappings()]

    def search(
        self, search: GroupSearch, limit: int, after: GroupKey = NEWEST, max_rows: int | None = None
    ) -> GroupPage:
        """Return at most `limit` groups that match `search`, newest first. The search begins after
        the key `after`. Rows of evaluations are left out. At most `max_rows` groups are read, by
        default MAX_SCANNED_ROWS. The search ends early if it takes longer than MAX_SEARCH_S."""
        ends_at = time.monotonic() + MAX_SEARCH_S
        conditions, values = search.sql()
        query = _PAGE.format(conditions=conditions)
        found: list[GroupRow] = []
        num_left = MAX_SCANNED_ROWS if max_rows is None else max_rows
        while num_left > 0:
            num_rows = min(ROWS_PER_SCAN, num_left)
            with self._read_engine.connect() as db:
                end = _end_of_scan(db, after, num_rows)
                bounds = (*after, *(end or (-math.inf, "")))
                rows = db.exec_driver_sql(query, (*bounds, *values, limit + 1 - len(found))).all()
            found += [GroupRow(*row) for row in rows]
            if len(found) > limit:
                return GroupPage(found[:limit], found[limit - 1].key)
            if end is None:
                return GroupPage(found)
            after = end
            num_left -= num_rows
            if time.monotonic() > ends_at:
                break
        return GroupPage(found, after, is_cut=True)

    def num_since(self, received_at: float, limit: int) -> int:
        """Return the number of groups received since `received_at`, in Unix seconds. The number is
        at most `limit`, so that the query is fast."""
        with self._read_engine.connect() as db:
            return db.exec_driver_sql(_NUM_SINCE, (received_at, limit)).scalar_one()

    def apps_since(self, received_at: float, limit: int) -> list[AppTraffic]:
        """Return the requests since `received_at`, in Unix seconds, counted by app. The app with
        the most requests comes first. Only the newest `limit` requests are counted, so that the
        query is fast. Requests of evaluations are not counted."""
        with self._read_engine.connect() as db:
            rows = db.exec_driver_sql(_APPS_SINCE, (received_at, limit)).all()
        return [AppTraffic(key, num, float(latest_at)) for key, num, latest_at in rows]


def _end_of_scan(db: Connection, after: GroupKey, num_rows: int) -> GroupKey | None:
    """Return the key of the last group that a scan of `num_rows` groups reads. The scan begins
    after the key `after`. Return None if there are fewer than `num_rows` groups."""
    row = db.exec_driver_sql(_END_OF_SCAN, (*after, num_rows - 1)).one_or_none()
    return None if row is None else (row[0], row[1])


def _sibling(row: Any) -> SiblingRecord:
    return SiblingRecord(**{key: value for key, value in row.items() if key != "group_id"})
