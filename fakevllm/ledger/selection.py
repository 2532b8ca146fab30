"""The groups that a command selects from a ledger file (a proxy's database), with the options
--where and --last. A group is a request with the answers (siblings) that were sampled for it.

The option --where takes an SQL condition. The SQL runs on a read-only connection, which refuses
every statement except queries. Rows of evaluations are never selected.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fakevllm.errors import UserError
from fakevllm.ledger.records import BROKEN_OFF, EVAL_KIND
from fakevllm_runtime.read_only import connect_read_only

PAGE_ROWS = 1000
"""Maximum number of groups that one query reads. The ids are read page by page, so that neither the
memory nor the length of a read transaction grows with the number of groups."""
STEPS_BETWEEN_CALLS = 100_000
"""Number of steps of SQLite's virtual machine after which a running query calls Python. This number
of steps takes about 10 ms."""
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_CHECKS = (
    "SELECT 1 FROM groups WHERE\n{where}\nLIMIT 0",
    "SELECT coalesce((\n{where}\n), 0) FROM groups LIMIT 0",
)
"""Two statements. If `where` is a single expression, both are valid. If `where` closes a
parenthesis too many, the first statement is not valid. If another clause follows the expression,
the second statement is not valid."""
_MATCHING = f"""
    FROM groups WHERE kind IS NOT '{EVAL_KIND}' AND (
        SELECT COUNT(*) FROM sibling_rows AS answered
        WHERE answered.group_id = groups.group_id AND answered.message_json IS NOT NULL
        AND answered.failure IS NOT '{BROKEN_OFF}'
    ) >= {{min_answers}} AND (
{{where}}
    )
"""
_KEY = "received_at, group_id"
_BACKWARDS = "ORDER BY received_at DESC, group_id DESC LIMIT 1 OFFSET ?"
_BETWEEN = f"AND ({_KEY}) >= (?, ?) AND ({_KEY}) <= (?, ?)"
_AFTER = f"AND ({_KEY}) > (?, ?) AND ({_KEY}) <= (?, ?)"

_Key = tuple[float, str]
"""A group's place in the order of the ledger: the time of the request, and the group's id."""
_BEFORE_ALL: _Key = (float("-inf"), "")


@dataclass(frozen=True, slots=True)
class GroupSelection:
    """The groups (requests with answers) in one ledger file that match a command's options."""

    ledger: Path
    where: str | None = None
    """SQL expression over the columns of the view `groups`; None selects all groups."""
    last: int | None = None
    """Number of the newest groups to select; None selects all."""
    min_answers: int = 0
    """Minimum number of answers of a selected group. Answers that the engine broke off do not
    count."""

    def find(self) -> SelectedGroups:
        """Find the groups in the ledger (the proxy's database) that match this selection now.
        Groups that are added later are not selected.

        Raises UserError if `where` is not an expression, or if the ledger cannot be read.
        """
        with self._reading() as db:
            # All queries see one state. A group that is added between two of them would push one of
            # the last groups out of the selection.
            db.execute("BEGIN")
            if self.where is not None:
                _check(db, self.where)
            newest = self._key(db, 0)
            if newest is None:
                return SelectedGroups(self, 0, _BEFORE_ALL, _BEFORE_ALL)
            oldest = None if self.last is None else self._key(db, self.last - 1)
            oldest = oldest or _BEFORE_ALL
            query = f"SELECT COUNT(*) {self._matching} {_BETWEEN}"
            (count,) = db.execute(query, (*oldest, *newest)).fetchone()
        return SelectedGroups(self, count, oldest, newest)

    def page(self, condition: str, first: _Key, newest: _Key) -> list[_Key]:
        """Return the keys (time and id) of at most PAGE_ROWS selected groups, oldest first.
        `condition` is SQL that limits the groups to those between the keys `first` and `newest`."""
        query = f"SELECT {_KEY} {self._matching} {condition} ORDER BY {_KEY} LIMIT {PAGE_ROWS}"
        with self._reading() as db:
            return db.execute(query, (*first, *newest)).fetchall()

    def _key(self, db: sqlite3.Connection, num_newer: int) -> _Key | None:
        """Return the key (time and id) of the selected group that follows the `num_newer` newest
        selected groups. Return None if there is no such group."""
        query = f"SELECT {_KEY} {self._matching} {_BACKWARDS}"
        return db.execute(query, (num_newer,)).fetchone()

    @property
    def _matching(self) -> str:
        return _MATCHING.format(min_answers=self.min_answers, where=self.where or "1")

    @contextmanager
    def _reading(self) -> Generator[sqlite3.Connection]:
        try:
            with closing(connect_read_only(self.ledger)) as db:
                # Python notices Ctrl-C only in Python code, so a long query must call some.
                db.set_progress_handler(lambda: 0, STEPS_BETWEEN_CALLS)
                yield db
        except sqlite3.Error as error:
            # Ctrl-C raises in the progress handler, and SQLite then ends the query.
            code = getattr(error, "sqlite_errorcode", None)
            if code == sqlite3.SQLITE_INTERRUPT:
                raise KeyboardInterrupt from None
            if self.where is not None and code == sqlite3.SQLITE_ERROR:
                raise UserError(f"--where {self.where!r} fails on a group: {error}.") from None
            raise UserError(f"The ledger {self.ledger} cannot be read: {error}.") from None


@dataclass(frozen=True, slots=True)
class SelectedGroups:
    """The groups (requests with their answers) that `GroupSelection.find` has found in the
    ledger."""

    selection: GroupSelection
    count: int
    _oldest: _Key
    _newest: _Key

    def ids(self) -> Iterator[str]:
        """Yield the ids of the selected groups, oldest first. Raises UserError if the ledger (the
        proxy's database) cannot be read."""
        first, condition = self._oldest, _BETWEEN
        while page := self.selection.page(condition, first, self._newest):
            yield from (group_id for _, group_id in page)
            first, condition = page[-1], _AFTER


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
    """Callback of SQLite's authorizer: allow queries and functions. Refuse every other action, such
    as writing, attaching a file or loading a library."""
    is_function = action == sqlite3.SQLITE_FUNCTION and second != "load_extension"
    return sqlite3.SQLITE_OK if action in _ALLOWED or is_function else sqlite3.SQLITE_DENY
