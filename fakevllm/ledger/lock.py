"""One proxy a ledger: two would send each other's groups twice."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from fakevllm.errors import LedgerError


class LedgerLock:
    """Held until closed. The kernel lets go of it when the process dies; readers do not ask."""

    def __init__(self, ledger: Path) -> None:
        """Makes the ledger's folder. Raises LedgerError where another proxy holds the lock."""
        folder = ledger.expanduser().parent
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Not the ledger itself: closing a second descriptor of it would end SQLite's own locks.
            # Not `lock` either: that is the server's, which may have the same folder.
            self._lock = os.open(folder / f"{ledger.name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise LedgerError(
                f"{ledger.parent} cannot be used ({error.strerror}): choose another --run-dir."
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise LedgerError(_told(ledger.parent, error)) from None

    def close(self) -> None:
        os.close(self._lock)


def _told(folder: Path, error: OSError) -> str:
    if isinstance(error, BlockingIOError):
        return f"{folder} is used by another proxy: choose another --run-dir."
    return f"{folder} cannot be locked ({error.strerror}): choose another --run-dir."
