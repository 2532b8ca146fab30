"""Let commands that only read a ledger (the proxy's database) use the ledger of an older version of
fakevllm. Such a command copies the ledger, and changes the copy to the current schema. The ledger
itself stays unchanged, so that the older version can still open it.

The copy is first written under a temporary name and then renamed. Therefore a copy under its final
name is always complete.
"""

from __future__ import annotations

import glob
import os
import sqlite3
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from fakevllm.errors import LedgerError, UserError
from fakevllm.ledger.migrations import MIGRATIONS
from fakevllm.ledger.store import Ledger
from fakevllm_runtime.read_only import connect_read_only

_CONTENTS = (
    "SELECT COUNT(*), MAX(received_at), COUNT(trained_step) FROM groups",
    "SELECT state, reason, COUNT(*) FROM groups GROUP BY state, reason ORDER BY state, reason",
    'SELECT COUNT(reward), ROUND(TOTAL(reward * ("index" + 1)), 6), ROUND(TOTAL(reward), 6) '
    "FROM siblings",
    "SELECT COUNT(*), MAX(received_at) FROM feedback",
    "SELECT state, reason, COUNT(*) FROM feedback GROUP BY state, reason ORDER BY state, reason",
    "SELECT edit_state, COUNT(*) FROM feedback GROUP BY edit_state ORDER BY edit_state",
    "SELECT COUNT(edited), COUNT(comment), COUNT(value), ROUND(TOTAL(value), 6) FROM feedback",
)
"""Queries on the content of a ledger. If groups or feedback are added, trained or withdrawn, or get
other rewards, the result of at least one of these queries changes."""
_CARRY_OVER = """
    INSERT OR IGNORE INTO rescored SELECT * FROM old.rescored
    WHERE group_id IN (SELECT group_id FROM group_rows)
"""


def offline_ledger(ledger: Path) -> Path:
    """Return a ledger file (a proxy's database) with the current schema. If this file is a copy of
    `ledger`, print a note about the copy to stderr. Raises UserError if there is no file
    `ledger`."""
    if not ledger.is_file():
        raise UserError(f"There is no ledger {ledger}: name another with --ledger.")
    file, note = current_schema(ledger)
    if note is not None:
        print(note, file=sys.stderr)
    return file


def current_schema(ledger: Path) -> tuple[Path, str | None]:
    """Return a pair: a ledger file with the current schema, and a note for the user. The note is
    None if the file is `ledger` itself.

    If `ledger` has the current schema, the file is `ledger` itself. Otherwise the file is a copy in
    the same folder. If an existing copy no longer has the contents of the ledger, the copy is made
    again. The new copy keeps the old copy's table `rescored`, which has the rewards of other hooks.

    Raises LedgerError if the file is no ledger or cannot be copied.
    """
    copy = ledger.with_name(f"{ledger.stem}.{MIGRATIONS[-1].__name__}{ledger.suffix}")
    try:
        with closing(connect_read_only(ledger)) as db:
            if _is_current(db):
                return ledger, None
            is_made = not _has_same_content(copy, db)
            if is_made:
                _make(copy, db)
    except (sqlite3.Error, OSError) as error:
        raise LedgerError(
            f"the ledger {ledger} cannot be read or copied ({error}); name another with --ledger"
        ) from None
    made = "was copied to" if is_made else "has a copy,"
    return copy, f"{ledger} has the schema of an older version. It {made} {copy}, which is used."


def copies_of(ledger: Path) -> list[Path]:
    """Return the copies of a ledger (a proxy's database) that this version and earlier versions of
    fakevllm have made in the ledger's folder. Delete the incomplete copies, which interrupted
    commands have left."""
    for part in ledger.parent.glob(f"{glob.escape(ledger.stem)}.m[0-9]*{ledger.suffix}.part"):
        part.unlink(missing_ok=True)
        _remove_log(part)
    return sorted(ledger.parent.glob(f"{glob.escape(ledger.stem)}.m[0-9]*{ledger.suffix}"))


def _make(copy: Path, db: sqlite3.Connection) -> None:
    """Copy the database to `copy`, and change the copy to the current schema. If there is an
    earlier copy, add its rows of the table `rescored`, which has the rewards of other hooks."""
    with _removed_on_error(copy.with_name(f"{copy.name}.part")) as part:
        with closing(sqlite3.connect(part)) as target:
            part.chmod(0o600)
            db.backup(target)
        Ledger.open(part).close()
        if _is_complete(copy):
            with closing(sqlite3.connect(part)) as target:
                target.execute("ATTACH ? AS old", (str(copy),))
                with target:
                    target.execute(_CARRY_OVER)
        _remove_log(copy)
        os.replace(part, copy)


@contextmanager
def _removed_on_error(part: Path) -> Generator[Path]:
    def remove() -> None:
        part.unlink(missing_ok=True)
        _remove_log(part)

    remove()  # an interrupted command may have left it
    try:
        yield part
    except BaseException:
        remove()
        raise


def _remove_log(file: Path) -> None:
    """Delete the write-ahead log of a database file that no process uses."""
    for suffix in ("-wal", "-shm"):
        file.with_name(file.name + suffix).unlink(missing_ok=True)


def _has_same_content(copy: Path, ledger: sqlite3.Connection) -> bool:
    if not _is_complete(copy):
        return False
    with closing(connect_read_only(copy)) as db:
        return all(_is_same(query, db, ledger) for query in _CONTENTS)


def _is_same(query: str, copy: sqlite3.Connection, ledger: sqlite3.Connection) -> bool:
    try:
        rows = ledger.execute(query).fetchall()
    except sqlite3.OperationalError as error:
        if str(error).startswith("no such "):  # an old ledger may lack the table or a column
            return True
        raise
    return rows == copy.execute(query).fetchall()


def _is_complete(copy: Path) -> bool:
    """Return True if a copy exists and has the current schema."""
    if not copy.exists():
        return False
    with closing(connect_read_only(copy)) as db, suppress(sqlite3.Error):
        return _is_current(db)
    return False


def _is_current(db: sqlite3.Connection) -> bool:
    applied = {row[0] for row in db.execute("SELECT name FROM migrations")}
    return all(migration.__name__ in applied for migration in MIGRATIONS)
