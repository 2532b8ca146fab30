"""Schema migrations of an SQLite file.

Migrations run in a fixed order. The file records which migrations have run, so each migration runs
once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from sqlalchemy import Connection

Migration = Callable[[Connection], None]
"""Function that makes one change of the schema. The function's name identifies the migration in the
file."""


log = logging.getLogger("fakevllm.migrations")


class NewerSchemaError(Exception):
    """Raised for an SQLite file to which a newer version of the program has applied migrations that
    this version does not know."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))


def migrate(db: Connection, migrations: Sequence[Migration], file_name: str) -> list[str]:
    """Apply the migrations that the SQLite file does not record yet, and record them. Return their
    names. Before an existing file is changed, log a line with `file_name`, such as "the ledger
    runs/default/ledger.sqlite".

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
    if applied and new:
        log.info(
            "%s was written by an older version: migrating its tables (%s). This takes minutes if "
            "the file is large. The older version cannot open the migrated file.",
            file_name,
            ", ".join(migration.__name__ for migration in new),
        )
    for migration in new:
        migration(db)
        row = (migration.__name__, time.time())
        db.exec_driver_sql("INSERT INTO migrations VALUES (?, ?)", row)
    return [migration.__name__ for migration in new]
