"""The journal: one SQLite file with all that was acknowledged, and what has become of it.

Writing never waits: a change gets a place in the queue, and whoever acknowledges it waits until
that place is on disk. Reading sees what is on disk.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import URL, Connection, Engine, StaticPool, create_engine, event
from sqlalchemy.exc import DatabaseError

from fakevllm_server.config.model import ConfigError
from fakevllm_server.journal.migrations import NewerJournal, migrate
from fakevllm_server.journal.retention import Retention
from fakevllm_server.journal.rows import CorruptCall
from fakevllm_server.journal.writer import Change, JournalError, JournalWriter
from fakevllm_server.types.crash_points import crash_point

P = ParamSpec("P")
T = TypeVar("T")

BUSY_TIMEOUT_S = 5.0
ACK_LIMIT_S = 8.0
"""How long an acknowledgement waits for the disk; less than clients wait for theirs."""
CLOSE_LIMIT_S = 10.0


class Journal:
    """Owns the file's writer thread and connections; close() last."""

    def __init__(self, path: Path) -> None:
        """Creates or updates the file. Raises ConfigError."""
        self._path = path
        self._engine = _engine(path, "BEGIN IMMEDIATE")
        self._reading = _engine(path, "BEGIN")
        try:
            # SQLite gives its -wal and -shm files the mode of the file.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            with self._engine.begin() as db:
                migrate(db)
            self._db = self._engine.connect()
        except NewerJournal as error:
            raise self._refused(f"was written by a newer version ({error})") from None
        except (OSError, DatabaseError, sqlite3.Error, ValueError) as error:
            cause = getattr(error, "orig", None) or getattr(error, "strerror", None) or error
            raise self._refused(f"cannot be opened ({cause})") from error
        self._forgetting = Retention()
        self._read_lock = threading.Lock()
        self._writer = JournalWriter(self._transact, _end_process)

    def put(self, *changes: Change) -> int:
        """Their place in the queue; several are written in this order, and may be in transactions
        of their own. Of none, the place of the last that was put."""
        place = self._writer.last_place
        for change in changes:
            place = self._writer.put(change)
        return place

    @property
    def reached(self) -> int:
        """The place up to which all is on disk."""
        return self._writer.reached

    async def reach(self, place: int, limit_s: float | None = ACK_LIMIT_S) -> None:
        """Until all up to that place is on disk. Raises JournalError."""
        await self._writer.reach(place, limit_s)

    async def write(self, *changes: Change) -> None:
        """Until they are on disk, however long that takes. Raises JournalError where they never
        will be."""
        await self.reach(self.put(*changes), None)

    async def settle(self) -> None:
        """Until nothing waits to be written: what is read right after is all there is. Raises
        JournalError."""
        while not self._writer.is_settled:
            await self.reach(self._writer.last_place)

    @property
    def trouble(self) -> str | None:
        """Why nothing is written now; None while all goes well."""
        return self._writer.trouble

    @property
    def is_full(self) -> bool:
        """Whether nothing new may be taken: the disk is too far behind."""
        return self._writer.is_full

    def check_room(self) -> None:
        """Raises JournalError where nothing new may be taken."""
        if self.is_full:
            raise JournalError(self.trouble or "too much waits to be written")

    def read(
        self, query: Callable[Concatenate[Connection, P], T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        """What a function of reads.py finds; blocks for microseconds where it reads by a key."""
        with self._read_lock, self._reading.begin() as db:
            return query(db, *arguments, **named)

    @contextmanager
    def opening(self) -> Generator[None]:
        """Around the first reads of a life. Raises ConfigError where the file is damaged."""
        try:
            damage = self.read(lambda db: db.exec_driver_sql("PRAGMA quick_check").scalar())
            if damage != "ok":
                raise ValueError(damage)
            yield
        except (DatabaseError, ValueError, TypeError, KeyError, CorruptCall) as error:
            self.close()
            cause = str(getattr(error, "orig", None) or error).partition("\n")[0]
            raise self._refused(f"is damaged ({cause})") from error

    def drain(self) -> bool:
        """Whether all that was put before is on disk; blocks."""
        return self._writer.drain(CLOSE_LIMIT_S)

    def close(self) -> None:
        """Writes what waits first."""
        self._writer.close(CLOSE_LIMIT_S)
        self._db.close()
        self._reading.dispose()
        self._engine.dispose()

    def _transact(self, changes: Sequence[Change]) -> None:
        with self._db.begin():
            for change in changes:
                change.make(self._db)
            self._forgetting.after(self._db, len(changes), time.time())
            for change in changes:
                crash_point(f"{change.label}.before_commit")
        for change in changes:
            crash_point(f"{change.label}.after_commit")

    def _refused(self, why: str) -> ConfigError:
        self._engine.dispose()
        self._reading.dispose()
        return ConfigError(f"the journal {self._path} {why}: mend it, or choose another --run-dir.")


def _end_process() -> None:
    """What is in memory may be ahead of the file for good: a new life knows where it stands."""
    os.kill(os.getpid(), signal.SIGTERM)


def _engine(path: Path, begin_with: str) -> Engine:
    url = URL.create("sqlite", database=str(path))
    engine = create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})

    def connect(connection: Any, _: object) -> None:
        # sqlite3 itself begins no transaction, so DDL is inside ours.
        connection.isolation_level = None
        for pragma in (
            f"busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}",
            "journal_mode = WAL",
            # An acknowledgement holds through a power cut, not only through a kill.
            "synchronous = FULL",
        ):
            connection.execute(f"PRAGMA {pragma}").close()

    def begin(db: Connection) -> None:
        db.exec_driver_sql(begin_with)

    event.listen(engine, "connect", connect)
    event.listen(engine, "begin", begin)
    return engine
