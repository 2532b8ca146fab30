"""The file `up.pid` in a run directory: which process runs `fakevllm up` on this directory.

The process holds a lock on the file. If the process dies, the kernel releases the lock. The number
in the file then means nothing, because another process may have got the same number. Therefore only
the lock says whether the process runs.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import time
from pathlib import Path

from fakevllm.errors import UserError
from fakevllm_runtime.path_access import unusable_message

NAME = "up.pid"
MAX_BYTES = 32
LOCK_TIMEOUT_S = 0.5
"""Seconds for which the lock is tried. `running_pid` in another process may hold it briefly."""
RETRY_S = 0.05


class PidFile:
    """The locked pid file of this process. `close` releases the lock."""

    def __init__(self, folder: Path) -> None:
        """Lock the pid file, and write this process's id to it. Raises UserError if another process
        holds the lock, or if the file cannot be used."""
        path = folder / NAME
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            message = unusable_message(path, error, "choose another --run-dir")
            raise UserError(message) from None
        try:
            self._lock(folder)
        except BaseException:
            os.close(self._fd)
            raise
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _lock(self, folder: Path) -> None:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(running_message(folder, _read_pid(self._fd))) from None
                time.sleep(RETRY_S)
            except OSError as error:
                raise UserError(
                    f"{folder / NAME} cannot be locked ({error.strerror}): choose a --run-dir on "
                    "another file system."
                ) from None

    def close(self) -> None:
        """Empty the pid file and release the lock. The file is not deleted, because another process
        may already have opened it, and would then lock a deleted file."""
        os.ftruncate(self._fd, 0)
        os.close(self._fd)


def running_pid(folder: Path) -> int | None:
    """Return the id of the process that runs `fakevllm up` on this run directory, or None. Raises
    UserError if the file may not be read."""
    try:
        fd = os.open(folder / NAME, os.O_RDONLY)
    except PermissionError:
        raise UserError(
            f"{folder / NAME} belongs to another user: run the command as this user."
        ) from None
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_pid(fd)
    finally:
        os.close(fd)
    return None


def running_message(folder: Path, pid: int | None) -> str:
    """Return the error message for a run directory that is in use."""
    process = "" if pid is None else f" (process {pid})"
    return (
        f"`fakevllm up` runs already on {folder}{process}: stop it with `{down_command(folder)}`, "
        "or choose another --run-dir."
    )


def down_command(folder: Path) -> str:
    """Return the shell command that stops the `fakevllm up` of this run directory."""
    return f"fakevllm down --run-dir {shlex.quote(str(folder))}"


def _read_pid(fd: int) -> int | None:
    text = os.pread(fd, MAX_BYTES, 0).strip()
    return int(text) if text.isdigit() else None
