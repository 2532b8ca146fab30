"""A ledger that is only read, by a process other than the proxy.

The file is never created, migrated or changed. Each read opens the file anew, so the file may
appear, disappear or be replaced at any time. The methods block the thread.
"""

from __future__ import annotations

import sqlite3
import stat
import threading
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import Engine, NullPool, create_engine
from sqlalchemy.exc import DatabaseError

from fakevllm.errors import LedgerError
from fakevllm.ledger.evaluation_reads import EvaluationReads
from fakevllm.ledger.feedback_reads import FeedbackReads
from fakevllm.ledger.group_reads import GroupReads
from fakevllm.ledger.migrations import MIGRATIONS
from fakevllm.ledger.reads import CallReads
from fakevllm.ledger.recorded_groups import RecordedGroups
from fakevllm.ledger.session_reads import SessionReads
from fakevllm.ledger.summary_reads import SummaryReads
from fakevllm_runtime.read_only import connect_read_only

READ_TIMEOUT_S = 10.0
"""Maximum seconds that all queries of one `with` block of `ReadOnlyLedger.reading` may take."""
STEPS_BETWEEN_CHECKS = 100_000
"""Number of steps of SQLite's virtual machine between two checks of the time. This number of steps
takes about 10 ms."""
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_NO_ACCESS = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    # While no proxy runs, a reader must create the files `-wal` and `-shm` beside the ledger.
    sqlite3.SQLITE_READONLY,
)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PRIMARY_CODE = 0xFF
"""Mask for the primary error code of an extended error code of SQLite."""


class ReadOnlyLedger:
    """Reader of a ledger file, for a process that must never change it."""

    def __init__(self, file: Path, timeout_s: float = READ_TIMEOUT_S) -> None:
        self.file = file.expanduser()
        self._timeout_s = timeout_s
        self._deadlines = threading.local()
        engine = create_engine("sqlite://", creator=self._connect, poolclass=NullPool)
        self._engine: Engine = engine
        self.calls = CallReads(engine)
        self.evaluations = EvaluationReads(engine)
        self.groups = GroupReads(engine)
        self.feedback = FeedbackReads(engine)
        self.sessions = SessionReads(engine)
        # Only the proxy has the key of the hashes that replace redacted ids. Such a request is not
        # found, and its conversation has redacted texts anyway.
        self.recorded_groups = RecordedGroups(engine, str)
        self.summary = SummaryReads(engine)

    @contextmanager
    def reading(self) -> Generator[None]:
        """Check that this version of fakevllm can read the file. If a read in the `with` block
        fails, raise LedgerError with a message of one sentence that says what to do. All reads in
        the block share one time limit, and must be made by the thread of the block."""
        self._deadlines.ends_at = time.monotonic() + self._timeout_s
        try:
            self._check_schema()
            yield
        except (DatabaseError, sqlite3.Error) as error:
            raise LedgerError(self._explain(error)) from error
        except (ValueError, TypeError, KeyError) as error:  # a row that no version has written
            raise LedgerError(self._damaged(error)) from error
        finally:
            self._deadlines.ends_at = None

    def state_of_files(self) -> object:
        """Return a value that changes when another process has written to the ledger. The value is
        made from the files' times and sizes, so no lock is taken."""
        state: list[tuple[int, int] | None] = []
        for name in (self.file.name, f"{self.file.name}-wal"):
            try:
                found = self.file.with_name(name).stat()
                state.append((found.st_mtime_ns, found.st_size))
            except OSError:
                state.append(None)
        return tuple(state)

    def _connect(self) -> sqlite3.Connection:
        db = connect_read_only(self.file)
        # A page may have been closed by its reader, so its queries need a limit of their own.
        ends_at: float = getattr(self._deadlines, "ends_at", None) or (
            time.monotonic() + self._timeout_s
        )
        db.set_progress_handler(lambda: int(time.monotonic() > ends_at), STEPS_BETWEEN_CHECKS)
        return db

    def _check_schema(self) -> None:
        try:
            mode = self.file.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):  # translates
            raise LedgerError(self._missing()) from None
        except PermissionError as error:  # translates
            raise LedgerError(self._no_access(error.strerror)) from error
        except OSError as error:  # translates
            raise LedgerError(self._unreadable(error.strerror)) from error
        if not stat.S_ISREG(mode):
            raise LedgerError(f"{self.file} is not a file: name a ledger with --ledger.")
        with closing(self._connect()) as db:
            tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master")}
            if not tables:  # the proxy is about to create them
                raise LedgerError(self._missing())
            if "migrations" not in tables:
                raise LedgerError(self._damaged("it has no table `migrations`"))
            applied = {row[0] for row in db.execute("SELECT name FROM migrations")}
        known = {migration.__name__ for migration in MIGRATIONS}
        if applied - known:
            raise LedgerError(
                f"The ledger {self.file} was written by a newer version of fakevllm: update the "
                "fakevllm that shows this page."
            )
        if known - applied:
            raise LedgerError(
                f"The ledger {self.file} was written by an older version of fakevllm: start the "
                "proxy of this version once, which updates the file."
            )

    def _explain(self, error: DatabaseError | sqlite3.Error) -> str:
        cause = getattr(error, "orig", None) or error
        code = getattr(cause, "sqlite_errorcode", 0) & _PRIMARY_CODE
        if code in _BUSY:
            return (
                f"Another process changes the whole ledger {self.file} at the moment: load this "
                "page again in a minute."
            )
        if code == sqlite3.SQLITE_INTERRUPT:
            return (
                f"The ledger {self.file} could not be read within {self._timeout_s:.0f} s: search "
                "for less, or try again when the machine is less busy."
            )
        if code in _NO_ACCESS:
            return self._no_access(cause)
        if code in _DAMAGED:
            return self._damaged(cause)
        return self._unreadable(cause)

    def _unreadable(self, cause: object) -> str:
        return (
            f"The ledger {self.file} could not be read ({_first_line(cause)}): load this page "
            "again, and check the disk and the free memory of the machine if that does not help."
        )

    def _missing(self) -> str:
        return (
            f"There is no ledger {self.file} yet: start the proxy with `fakevllm serve`, or "
            "name another ledger with --ledger."
        )

    def _no_access(self, cause: object) -> str:
        return (
            f"The ledger {self.file} cannot be opened ({_first_line(cause)}): run the command as "
            "the user who owns the file."
        )

    def _damaged(self, cause: object) -> str:
        return (
            f"The file {self.file} is damaged, or is not a ledger ({_first_line(cause)}): stop the "
            "proxy and restore the file from a backup, or name another ledger with --ledger."
        )


def _first_line(cause: object) -> str:
    return str(cause).partition("\n")[0]
