"""Erase the bytes of deleted rows from an SQLite file in WAL mode.

With `secure_delete`, SQLite overwrites deleted rows with zeros. The write-ahead log still has the
earlier pages, until a checkpoint truncates the log. `VACUUM` also erases what was deleted before
`secure_delete` was switched on.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

SECURE_DELETE = "secure_delete = ON"
"""The pragma of every connection that writes a file whose deleted rows must leave no bytes."""
TRY_S = 0.2
"""Seconds for which one attempt to truncate the log waits for readers. The attempt holds the lock
for writing meanwhile, so it must be much shorter than the busy timeout of the file's writer."""
PAUSE_S = 0.2
"""Seconds between two attempts."""


def truncate_log(file: Path, timeout_s: float, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Write the write-ahead log of an SQLite file into the file, and truncate the log. Return False
    if other processes still read an old state of the file after `timeout_s` seconds. The function
    blocks the thread."""
    deadline = time.monotonic() + timeout_s
    with closing(sqlite3.connect(file, timeout=TRY_S, isolation_level=None)) as db:
        while True:
            try:
                is_busy = bool(db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])
            except sqlite3.OperationalError:  # retried: another process holds the lock
                is_busy = True
            if not is_busy or time.monotonic() >= deadline:
                return not is_busy
            sleep(PAUSE_S)


def vacuum(file: Path) -> None:
    """Write a database file anew, without the bytes of deleted rows. No other process may use the
    file. Raises sqlite3.Error if the file cannot be written."""
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("VACUUM")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
