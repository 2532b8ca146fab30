"""The server's journal, which is a SQLite file. The module queues changes, waits until they are on
disk, and reads rows.

`put` never blocks. It gives each change a position in the queue of the writer thread. The server
acknowledges a request only after the request's change is on disk. A read returns only changes that
are on disk.
"""

from __future__ import annotations

import logging
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

from fakevllm_runtime.erasure import SECURE_DELETE, truncate_log, vacuum
from fakevllm_runtime.errors import ConfigError
from fakevllm_runtime.migrations import NewerSchemaError, migrate
from fakevllm_runtime.path_access import is_refused_access, unusable_message
from fakevllm_server.journal.group_commit_writer import Change, JournalError, JournalWriter
from fakevllm_server.journal.migrations import MIGRATIONS, m008_loose_pieces
from fakevllm_server.journal.prompts import recent_prompts
from fakevllm_server.journal.retention import Retention
from fakevllm_server.journal.rows import CorruptCall
from fakevllm_server.types.crash_points import crash_point

log = logging.getLogger("fakevllm.server")

P = ParamSpec("P")
T = TypeVar("T")

BUSY_TIMEOUT_S = 5.0
ACK_LIMIT_S = 8.0
"""Maximum number of seconds that an acknowledgement waits for the disk. Clients wait longer for a
reply."""
CLOSE_LIMIT_S = 10.0


JOB = "job"
"""Key of the table `meta`. Its value is the YAML of the job with which the engine was started
last."""
JOB_IDENTITY = "job_identity"
"""Key of the table `meta`. Its value is the identity of this job in JSON: the settings that decide
whether another job counts as the same job. Journals of older servers do not have this key."""
DISTRUSTED_VERSIONS = "distrusted_versions"
"""Key of the table `meta`. Its value is a JSON list of version numbers. Under each of these
numbers, the engine had other weights than the trainer. Journals of older servers do not have this
key."""
GROUPS_OF_OTHER_RUNS = "groups_of_other_runs"
"""Key of the table `meta`. Its value is a JSON list with the ids of groups that were begun in other
runs of the server."""


class Journal:
    """The journal (SQLite file) of one run, with its writer thread and its database connections.
    Call `close` after the last use."""

    def __init__(self, path: Path) -> None:
        """Open the journal file, create the file if it does not exist, and apply migrations.

        Raises ConfigError if the file cannot be opened or was written by a newer version.
        """
        self._path = path
        self._write_engine = _open_engine(path, "BEGIN IMMEDIATE")
        self._read_engine = _open_engine(path, "BEGIN")
        try:
            # SQLite gives its -wal and -shm files the mode of the file.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            is_old = path.stat().st_size > 0
            with self._write_engine.begin() as db:
                applied = migrate(db, MIGRATIONS, f"the journal {path}")
            if is_old and m008_loose_pieces.__name__ in applied:
                self._erase_free_pages()
            self._db = self._write_engine.connect()
            self._look_up_db = self._read_engine.connect()
        except NewerSchemaError as error:
            raise self._config_error(
                f"was written by a newer version of fakevllm ({error})", "update fakevllm"
            ) from None
        except (OSError, DatabaseError, sqlite3.Error, ValueError) as error:
            if isinstance(error, OSError) and is_refused_access(error):
                message = unusable_message(path, error, "choose another --run-dir")
                raise ConfigError(f"The journal {message}") from error
            cause = getattr(error, "orig", None) or getattr(error, "strerror", None) or error
            raise self._config_error(f"cannot be opened ({cause})") from error
        self._retention = Retention()
        self._read_lock = threading.Lock()
        self._writer = JournalWriter(self._transact, _end_process)

    def put(self, *changes: Change) -> int:
        """Queue changes of the journal (the server's SQLite file) for the thread that writes them.
        Return the queue position of the last change.

        The changes are written in the given order, possibly in separate transactions. Without any
        changes, return the position of the newest change in the queue.
        """
        return self._writer.put(*changes)

    @property
    def written_position(self) -> int:
        """Queue position of the newest change that is in the journal file on disk. All changes that
        were queued before this change are on disk too."""
        return self._writer.written_position

    async def wait_written(self, position: int, limit_s: float | None = ACK_LIMIT_S) -> None:
        """Wait until all journal changes up to a queue position are on disk.

        Raises JournalError after `limit_s` seconds, or if the writer has stopped.
        """
        await self._writer.wait_written(position, limit_s)

    async def write(self, *changes: Change) -> None:
        """Queue changes of the journal (the server's SQLite file), and wait until they are on disk.
        The wait has no time limit.

        Raises JournalError if the writer has stopped.
        """
        await self.wait_written(self.put(*changes), None)

    async def flush(self) -> None:
        """Wait until all queued changes of the journal are on disk. The next read then returns all
        changes.

        Raises JournalError if the disk is slow or the writer has stopped.
        """
        while not self._writer.is_flushed:
            await self.wait_written(self._writer.last_position)

    @property
    def error(self) -> str | None:
        """Reason why no change can be written to the journal (the server's SQLite file) at present,
        or None if writing works."""
        return self._writer.error

    @property
    def is_broken(self) -> bool:
        """Whether no change can ever be written to the journal again, because of a bug or a damaged
        file."""
        return self._writer.is_broken

    @property
    def is_full(self) -> bool:
        """Whether the queue of journal changes is full. Callers must then queue no new change."""
        return self._writer.is_full

    def check_capacity(self) -> None:
        """Raise JournalError if the queue of journal changes is full. The queue is full if too many
        changes wait for the disk."""
        if self.is_full:
            raise JournalError(self.error or "too many changes wait to be written")

    def read(
        self, query: Callable[Concatenate[Connection, P], T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        """Run a query function of `journal/reads.py` on the journal (the server's SQLite file), and
        return its result.

        The thread is blocked until the query ends.
        """
        with self._read_lock, self._read_engine.begin() as db:
            return query(db, *arguments, **named)

    def look_up(
        self, query: Callable[Concatenate[Connection, P], T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        """Run a query function on the journal (the server's SQLite file), and return its result.
        The query must be a single SQL statement that reads one row by its key, or a small table.

        The query takes microseconds. It runs without a transaction, because a single statement
        needs none.
        """
        with self._read_lock:
            return query(self._look_up_db, *arguments, **named)

    @contextmanager
    def opening(self) -> Generator[None]:
        """Check the journal file when the `with` block begins. If the file is damaged, or if
        reading the journal fails in the block, close the journal and raise ConfigError."""
        try:
            damage = self.read(lambda db: db.exec_driver_sql("PRAGMA quick_check").scalar())
            if damage != "ok":
                raise ValueError(damage)
            yield
        except (DatabaseError, ValueError, TypeError, KeyError, CorruptCall) as error:
            self.close()
            cause = str(getattr(error, "orig", None) or error).partition("\n")[0]
            raise self._config_error(f"is damaged ({cause})") from error

    def _erase_free_pages(self) -> None:
        """Write the journal file anew, because older versions of the server deleted rows without
        overwriting their bytes."""
        try:
            vacuum(self._path)
        except sqlite3.Error as error:  # isolates: the disk may lack space for a second file
            log.warning(
                "the journal %s still has bytes that an older version deleted (%s): "
                "run `sqlite3 %s VACUUM` while the server is stopped",
                self._path,
                error,
                self._path,
            )

    def truncate_log(self, timeout_s: float) -> bool:
        """Truncate the journal's write-ahead log (SQLite's -wal file), so that it has no bytes of
        deleted rows. Return False if another process still reads an old state of the journal after
        `timeout_s` seconds. The method blocks the thread."""
        return truncate_log(self._path, timeout_s)

    def drain(self) -> bool:
        """Block until all journal changes that were queued before this call are on disk, and return
        True. Return False if this takes longer than CLOSE_LIMIT_S seconds."""
        return self._writer.drain(CLOSE_LIMIT_S)

    def close(self) -> None:
        """Write the queued changes to the journal file, then close the file."""
        self._writer.close(CLOSE_LIMIT_S)
        self._db.close()
        self._look_up_db.close()
        self._read_engine.dispose()
        self._write_engine.dispose()

    def _transact(self, changes: Sequence[Change]) -> None:
        with recent_prompts(self._db).transaction(), self._db.begin():
            for change in changes:
                change.apply(self._db)
            self._retention.run_after(self._db, len(changes), time.time())
            for change in changes:
                crash_point(f"{change.label}.before_commit")
        for change in changes:
            crash_point(f"{change.label}.after_commit")

    def _config_error(self, problem: str, remedy: str = "repair it") -> ConfigError:
        """Close the journal's database connections, and return a ConfigError with this problem and
        this remedy. The caller must raise it."""
        self._write_engine.dispose()
        self._read_engine.dispose()
        return ConfigError(
            f"the journal {self._path} {problem}: {remedy}, or choose another --run-dir."
        )


def _end_process() -> None:
    """End the server process. This function is called when changes in the server's memory can never
    be written.

    After a restart, the server continues with the state in the journal file.
    """
    os.kill(os.getpid(), signal.SIGTERM)


def _open_engine(path: Path, begin_with: str) -> Engine:
    url = URL.create("sqlite", database=str(path))
    engine = create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})

    def connect(connection: Any, _: object) -> None:
        # Keep sqlite3 from beginning transactions itself, so that DDL is part of ours.
        connection.isolation_level = None
        for pragma in (
            f"busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}",
            "journal_mode = WAL",
            # An acknowledgement holds through a power cut, not only through a kill.
            "synchronous = FULL",
            SECURE_DELETE,
        ):
            connection.execute(f"PRAGMA {pragma}").close()

    def begin(db: Connection) -> None:
        db.exec_driver_sql(begin_with)

    event.listen(engine, "connect", connect)
    event.listen(engine, "begin", begin)
    return engine
