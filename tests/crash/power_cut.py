"""A simulated power cut, which also loses the checkpoint data that was never flushed.

`PowerCut` watches `os.fsync` and the checkpoints of one server process. At the cut, it empties each
checkpoint file that was not flushed after its last write. It also gives each folder whose new name
was not flushed its old name. Therefore a wrong order of flush and rename fails a test.

The journal's own file is not covered, because SQLite flushes it from C. Its durability depends on
`synchronous = FULL`, which the journal's test_migrations.py reads from the writer's connection.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


class PowerCut:
    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._flushed = {_identity(file.stat()) for file in self._files()}
        """Identities of the files at their last flush.

        Files of an earlier process count as flushed."""
        self._names = self._present()
        """Names of the folders at the last flush of their parent."""
        self._fsync = os.fsync

    def watch(self) -> None:
        """Record each `os.fsync` of this process from now on."""
        os.fsync = self._record_fsync

    def apply(self) -> None:
        """Remove from the disk what was not flushed."""
        for file in self._files():
            if _identity(file.stat()) not in self._flushed:
                os.truncate(file, 0)
        for name in self._present() - self._names:
            folder = self._checkpoints / name
            folder.rename(folder.with_name(f"{name}.tmp"))

    def _record_fsync(self, fd: int) -> None:
        self._fsync(fd)
        status = os.fstat(fd)
        self._flushed.add(_identity(status))
        if stat.S_ISDIR(status.st_mode) and status.st_ino == self._checkpoints.stat().st_ino:
            self._names = self._present()

    def _files(self) -> list[Path]:
        return [file for file in self._checkpoints.rglob("*") if file.is_file()]

    def _present(self) -> set[str]:
        return {folder.name for folder in self._checkpoints.glob("step-*") if not folder.suffix}


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_mtime_ns, status.st_size
