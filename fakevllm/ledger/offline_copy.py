"""Ledgers of older versions for commands that only evaluate a ledger. Such a command changes a copy
to the current schema, so that the older version of fakevllm can still open the ledger itself."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from fakevllm.errors import LedgerError
from fakevllm.ledger.migrations import MIGRATIONS
from fakevllm.ledger.store import Ledger


def current_schema(ledger: Path) -> tuple[Path, str | None]:
    """Return a ledger file with the current schema, and a note for the user, or None.

    The file is `ledger` itself if it has the current schema. Otherwise the file is a copy beside
    it, which is made unless it exists and is newer than the ledger.

    Raises LedgerError if the file is no ledger or cannot be copied.
    """
    copy = ledger.with_name(f"{ledger.stem}.{MIGRATIONS[-1].__name__}{ledger.suffix}")
    try:
        with closing(sqlite3.connect(_read_only(ledger), uri=True)) as db:
            applied = {row[0] for row in db.execute("SELECT name FROM migrations")}
            if all(migration.__name__ in applied for migration in MIGRATIONS):
                return ledger, None
            is_made = not _is_newer(copy, ledger)
            if is_made:
                with closing(sqlite3.connect(copy)) as target:
                    copy.chmod(0o600)
                    db.backup(target)
                Ledger.open(copy).close()  # migrates it
    except (sqlite3.Error, OSError) as error:
        raise LedgerError(
            f"the ledger {ledger} cannot be read or copied ({error}); name another with --ledger"
        ) from None
    made = "was copied to" if is_made else "has a copy,"
    return copy, f"{ledger} has the schema of an older version. It {made} {copy}, which is used."


def _read_only(file: Path) -> str:
    return f"file:{quote(str(file.absolute()))}?mode=ro"


def _is_newer(copy: Path, ledger: Path) -> bool:
    return copy.exists() and copy.stat().st_mtime >= ledger.stat().st_mtime
