"""Faults of a journal's disk, and a writer that is blocked."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from fakevllm_server.journal.group_commit_writer import Change
from fakevllm_server.journal.store import Journal

LIMIT_S = 10.0


class Disk:
    """A simulated disk. It sets SQLite's pragmas so that the journal's writes are refused."""

    def __init__(self, journal: Journal) -> None:
        connections: list[Any] = []
        journal.put(Change("look", lambda db: connections.append(db.connection.dbapi_connection)))
        assert journal.drain()
        (self._db,) = connections

    def fill(self) -> None:
        """Refuse writes that need more pages, as a full disk does."""
        self._set("max_page_count = 1")

    def free_space(self) -> None:
        """Accept new pages again."""
        self._set("max_page_count = 1073741823")

    def refuse(self) -> None:
        """Refuse all writes."""
        self._set("query_only = 1")

    def accept(self) -> None:
        """Accept writes again."""
        self._set("query_only = 0")

    def _set(self, pragma: str) -> None:
        self._db.execute(f"PRAGMA {pragma}").close()


class BlockedWriter:
    """A change that blocks the writer, so that later changes wait until `release` is called."""

    def __init__(self, journal: Journal) -> None:
        self._is_blocking, self._released = threading.Event(), threading.Event()
        journal.put(Change("held", self._wait))
        assert self._is_blocking.wait(LIMIT_S)

    def release(self) -> None:
        self._released.set()

    def _wait(self, db: Connection) -> None:
        self._is_blocking.set()
        self._released.wait(LIMIT_S)


def rows(path: Path, query: str, *values: Any) -> list[Any]:
    """Return the rows that another process reads from the file."""
    db = sqlite3.connect(path)
    try:
        return db.execute(query, values).fetchall()
    finally:
        db.close()
