"""A journal's disk, and a writer that is held up: what a test can do to both."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from fakevllm_server.journal.store import Journal
from fakevllm_server.journal.writer import Change

LIMIT_S = 10.0


class Disk:
    """As SQLite itself sees it, through the connection that writes."""

    def __init__(self, journal: Journal) -> None:
        found: list[Any] = []
        journal.put(Change("look", lambda db: found.append(db.connection.dbapi_connection)))
        assert journal.drain()
        (self._db,) = found

    def fill(self) -> None:
        """No page can be added."""
        self._do("max_page_count = 1")

    def make_room(self) -> None:
        self._do("max_page_count = 1073741823")

    def refuse(self) -> None:
        """Nothing at all can be written."""
        self._do("query_only = 1")

    def accept(self) -> None:
        self._do("query_only = 0")

    def _do(self, pragma: str) -> None:
        self._db.execute(f"PRAGMA {pragma}").close()


class Held:
    """A change in front of all that are put later: they wait until it is let go."""

    def __init__(self, journal: Journal) -> None:
        self._is_there, self._may_go = threading.Event(), threading.Event()
        journal.put(Change("held", self._wait))
        assert self._is_there.wait(LIMIT_S)

    def let_go(self) -> None:
        self._may_go.set()

    def _wait(self, db: Connection) -> None:
        self._is_there.set()
        self._may_go.wait(LIMIT_S)


def rows(path: Path, query: str, *values: Any) -> list[Any]:
    """What another process finds in the file."""
    db = sqlite3.connect(path)
    try:
        return db.execute(query, values).fetchall()
    finally:
        db.close()
