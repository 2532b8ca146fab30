"""The lock that allows only one proxy per ledger. The ledger is the proxy's SQLite file. Without
the lock, two proxies with the same ledger would send the same rewards to the server."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from fakevllm.errors import LedgerError
from fakevllm_runtime.path_access import unusable_message


class LedgerLock:
    """An exclusive lock on a ledger file. The lock is held until `close`. If the process dies, the
    kernel releases the lock.

    Processes that only read the ledger need no lock.
    """

    def __init__(self, ledger: Path) -> None:
        """Create the ledger's folder if needed, and take the lock.

        Raises LedgerError if another proxy holds the lock, or if the folder cannot be used.
        """
        folder = ledger.expanduser().parent
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The ledger itself cannot be the lock: closing a second descriptor of the file would
            # release SQLite's own locks. The file `lock` is the swarm server's, whose run may be
            # in the same folder.
            self._lock = os.open(folder / f"{ledger.name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            message = unusable_message(ledger.parent, error, "choose another --run-dir")
            raise LedgerError(message) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise LedgerError(_lock_error(ledger.parent, error)) from None

    def close(self) -> None:
        """Release the lock on the ledger (the proxy's SQLite file)."""
        os.close(self._lock)


def _lock_error(folder: Path, error: OSError) -> str:
    if isinstance(error, BlockingIOError):
        return f"{folder} is used by another proxy: choose another --run-dir."
    return f"{folder} cannot be locked ({error.strerror}): choose another --run-dir."
