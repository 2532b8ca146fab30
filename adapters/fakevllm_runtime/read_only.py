"""Read an SQLite file that another process may be writing to."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from urllib.parse import quote

BUSY_TIMEOUT_S = 5.0
"""Maximum seconds for which a read waits for a lock of another process."""


def connect_read_only(file: Path) -> sqlite3.Connection:
    """Return a connection that can only read the SQLite file. It does not create a missing file.

    Raises sqlite3.OperationalError if the file cannot be opened.
    """
    uri = f"file:{quote(str(file.absolute()))}?mode=ro"
    return sqlite3.connect(uri, timeout=BUSY_TIMEOUT_S, uri=True)
