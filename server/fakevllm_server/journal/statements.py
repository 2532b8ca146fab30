"""Run one SQL statement of the journal (the server's SQLite file) directly with Python's sqlite3,
without SQLAlchemy.

SQLAlchemy adds 50 to 200 µs to a statement, and SQLite itself takes a few µs. Use these functions
for statements that run for each call or each group. The statements run in the transaction of the
SQLAlchemy connection. If a statement fails, the function raises an error of sqlite3.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, cast

from sqlalchemy import Connection


def execute(db: Connection, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
    """Run a statement, and return the cursor with the resulting rows."""
    return _connection(db).execute(statement, values)


def execute_many(db: Connection, statement: str, rows: Iterable[Sequence[Any]]) -> None:
    """Run a statement once for each row of values."""
    _connection(db).executemany(statement, rows)


def _connection(db: Connection) -> sqlite3.Connection:
    return cast(sqlite3.Connection, db.connection.driver_connection)
