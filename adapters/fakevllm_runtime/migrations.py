"""Schema migrations of an SQLite file.

Migrations run in a fixed order. The file records which migrations have run, so each migration runs
once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sqlalchemy import Connection

Migration = Callable[[Connection], None]
"""Function that makes one change of the schema. The function's name identifies the migration in the
file."""


class NewerSchemaError(Exception):
    """Raised for an SQLite file to which a newer version of the program has applied migrations that
    this version does not know."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))


def migrate(db: Connection, migrations: Sequence[Migration]) -> list[str]:
    """Apply the migrations that the SQLite file does not record yet, and record them. Return their
    names.

    Raises NewerSchemaError if the file records migrations that this version does not know.
    """
    db.exec_driver_sql(
        "CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, applied_at REAL NOT NULL)"
    )
    applied = set(db.exec_driver_sql("SELECT name FROM migrations").scalars())
    unknown = applied - {migration.__name__ for migration in migrations}
    if unknown:
        raise NewerSchemaError(sorted(unknown))
    new = [migration for migration in migrations if migration.__name__ not in applied]
    for migration in new:
        migration(db)
        row = (migration.__name__, time.time())
        db.exec_driver_sql("INSERT INTO migrations VALUES (?, ?)", row)
    return [migration.__name__ for migration in new]
