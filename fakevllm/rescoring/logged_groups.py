"""The groups in a ledger that a command selects, in the form in which hooks get them. A group is a
request with the answers (siblings) that were sampled for it.

The user's condition is SQL. It runs on a connection that can only read, and an authorizer refuses
everything but queries.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from fakevllm.errors import UserError
from fakevllm.hooks.recorded_group import RecordedGroup
from fakevllm.ledger.records import BROKEN_OFF, EVAL_KIND, GroupRecord

MIN_ANSWERS = 2
"""Number of answers from which on a group can be scored. A single answer cannot be compared."""

_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_CHECKS = (
    "SELECT 1 FROM groups WHERE\n{where}\nLIMIT 0",
    "SELECT coalesce((\n{where}\n), 0) FROM groups LIMIT 0",
)
"""Statements that are both valid only if `where` is one expression. The first refuses a parenthesis
too many, and the second refuses another clause after the expression."""
_SELECT = f"""
    SELECT group_id, received_at FROM groups
    WHERE kind IS NOT '{EVAL_KIND}' AND (
        SELECT COUNT(*) FROM sibling_rows AS answered
        WHERE answered.group_id = groups.group_id AND answered.message_json IS NOT NULL
        AND answered.failure IS NOT '{BROKEN_OFF}'
    ) >= {MIN_ANSWERS} AND (
{{where}}
    ) ORDER BY received_at {{order}}, group_id {{order}}
"""


@dataclass(frozen=True, slots=True)
class LoggedGroup:
    """A logged group with its rewards. All lists have the order of the siblings that hooks get."""

    recorded: RecordedGroup
    rewards: Sequence[float | None]
    failures: Sequence[str | None]
    """For each sibling, why the answer is not usable; None for a usable answer."""
    served: int | None
    """Position of the sibling that the app got; None if the app got none of them."""

    @staticmethod
    def of(group: GroupRecord, recorded: RecordedGroup) -> LoggedGroup:
        """Join a group of the ledger with the form that hooks get."""
        by_index = {sibling.index: sibling for sibling in group.siblings}
        siblings = [by_index[index] for index in recorded.indices]
        served = (i for i, sibling in enumerate(siblings) if sibling.served)
        return LoggedGroup(
            recorded,
            [sibling.reward for sibling in siblings],
            [sibling.failure for sibling in siblings],
            next(served, None),
        )


def selected_groups(ledger: Path, where: str | None = None, last: int | None = None) -> list[str]:
    """Return the ids of the groups that hooks can score, oldest first.

    Groups need two answers, and rows of evaluations are left out. `where` is an SQL expression over
    the columns of the view `groups`. With `last`, only the newest groups are returned.

    Raises UserError if `where` is not an expression, or if the ledger cannot be read.
    """
    uri = f"file:{quote(str(ledger.absolute()))}?mode=ro"
    query = _SELECT.format(where=where or "1", order="ASC" if last is None else "DESC")
    if last is not None:
        query += " LIMIT ?"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as db:
            if where is not None:
                _check(db, where)
            rows = db.execute(query, () if last is None else (last,)).fetchall()
    except sqlite3.Error as error:
        raise UserError(f"The ledger {ledger} cannot be read: {error}.") from None
    group_ids = [row[0] for row in rows]
    return group_ids if last is None else group_ids[::-1]


def _check(db: sqlite3.Connection, where: str) -> None:
    db.set_authorizer(_authorize)
    try:
        for statement in _CHECKS:
            db.execute(statement.format(where=where))
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise UserError(
            f"--where {where!r} is not an SQL expression over the columns of `groups` ({error}): "
            "write one, such as \"step >= 10 AND app_key = '0a1b2c3d'\"."
        ) from None


def _authorize(action: int, first: str | None, second: str | None, *_: object) -> int:
    """Allow queries and functions. Refuse all that writes, attaches files or loads libraries."""
    is_function = action == sqlite3.SQLITE_FUNCTION and second != "load_extension"
    return sqlite3.SQLITE_OK if action in _ALLOWED or is_function else sqlite3.SQLITE_DENY
