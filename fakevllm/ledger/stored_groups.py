"""The groups whose contents are still in the ledger, oldest first, with the facts that decide
whether a group may be pruned. A group is a request with the answers that were sampled for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import Engine

ROWS_PER_PAGE = 200
"""Number of groups that one query reads."""
_Place = tuple[float, str]
"""A group's place in the order of the ledger: the time of the request, and the group's id."""
OLDEST: _Place = (float("-inf"), "")
OPEN_FEEDBACK = """
    EXISTS (SELECT 1 FROM feedback AS f WHERE f.group_id = g.group_id
    AND (f.state IN ('received', 'waiting', 'pooled') OR f.edit_state IN ('waiting', 'pooled')))
"""
"""SQL that is true if feedback about the answer of the group `g` waits to be trained."""
_PAGE = f"""
    SELECT g.group_id, g.received_at,
           length(g.request_json) + length(g.question)
           + COALESCE((SELECT SUM(json_extract(s.value, '$[2]')) FROM json_each(
               CASE WHEN json_valid(g.request_slices) THEN g.request_slices ELSE '[]' END
             ) AS s), 0)
           + COALESCE((SELECT SUM(COALESCE(length(message_json), 0) + COALESCE(length(text), 0)
               + COALESCE(length(annotations_json), 0)) FROM sibling_rows AS s
             WHERE s.group_id = g.group_id), 0)
           + COALESCE((SELECT SUM(length(prompt_ids) + length(response_ids)
               + COALESCE(length(logprobs), 0)) FROM call_rows AS c
             WHERE c.group_id = g.group_id), 0),
           g.state, g.eval_id,
           {OPEN_FEEDBACK},
           (SELECT MAX(until) FROM kept_answers AS k WHERE k.group_id = g.group_id)
    FROM group_rows AS g
    WHERE (g.received_at, g.group_id) > (?1, ?2)
    AND NOT EXISTS (SELECT 1 FROM forgotten_groups AS f WHERE f.group_id = g.group_id)
    ORDER BY g.received_at, g.group_id LIMIT {ROWS_PER_PAGE}
"""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group whose contents are in the ledger.

    >>> StoredGroup("g", received_at=0.0, num_bytes=10, state="trained").has_open_feedback
    False
    """

    group_id: str
    received_at: float
    """Unix seconds."""
    num_bytes: int
    """Approximate size of the contents. Contents that other groups share count too."""
    state: str
    """A `State`."""
    eval_id: str | None = None
    """Id of the evaluation to which the group belongs. None for a request of an app."""
    has_open_feedback: bool = False
    """Whether feedback about the answer waits to be trained."""
    kept_until: float | None = None
    """Time until which a retry of the request gets the kept answer, in Unix seconds. None if no
    answer is kept."""

    @property
    def place(self) -> tuple[float, str]:
        """The group's place in the order of the ledger: (time of the request, id of the group)."""
        return self.received_at, self.group_id


class StoredGroups:
    """Reader of the groups whose contents are still in the ledger. The methods block the thread."""

    def __init__(self, read_engine: Engine) -> None:
        self._read_engine = read_engine

    def after(self, place: _Place = OLDEST) -> Iterator[StoredGroup]:
        """Yield the groups after `place` (a time and an id), oldest first, page by page."""
        while True:
            with self._read_engine.connect() as db:
                rows = db.exec_driver_sql(_PAGE, place).all()
            for group_id, at, num_bytes, state, eval_id, has_open, until in rows:
                yield StoredGroup(group_id, at, num_bytes, state, eval_id, bool(has_open), until)
            if len(rows) < ROWS_PER_PAGE:
                return
            place = (rows[-1][1], rows[-1][0])
