"""Run one SQL statement of the journal on the connection of Python's sqlite3.

SQLAlchemy takes 50 to 200 µs for a statement. SQLite itself takes a few µs. Use these functions for
statements that run for each call or each group. The statements run in the transaction of the
SQLAlchemy connection. Errors are those of sqlite3.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, cast

from sqlalchemy import Connection


def execute(db: Connection, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
    """Run a statement, and return the cursor with its rows."""
    return _connection(db).execute(statement, values)


def execute_many(db: Connection, statement: str, rows: Iterable[Sequence[Any]]) -> None:
    """Run a statement once for each row of values."""
    _connection(db).executemany(statement, rows)


def _connection(db: Connection) -> sqlite3.Connection:
    return cast(sqlite3.Connection, db.connection.driver_connection)
