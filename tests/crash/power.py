"""What a power cut takes beyond what a kill takes: files and names that were never flushed.

It watches `os.fsync` and the checkpoints of one life. At the cut, a file there that was not flushed
since it was written is empty, and a folder whose new name was not flushed has its old one. That
shows an order of ours that is wrong. It shows nothing of the journal's own file, which SQLite
flushes from C: for that there is `synchronous = FULL`, which the journal's test_migrations.py reads
off the writer's connection.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


class Power:
    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._flushed = {_identity(file.stat()) for file in self._files()}
        """Files as they were when they were flushed last; what a life before left is on disk."""
        self._names = self._present()
        """Of folders, when their parent was flushed last."""
        self._fsync = os.fsync

    def watch(self) -> None:
        """From now on in this process."""
        os.fsync = self._watched

    def cut(self) -> None:
        for file in self._files():
            if _identity(file.stat()) not in self._flushed:
                os.truncate(file, 0)
        for name in self._present() - self._names:
            folder = self._checkpoints / name
            folder.rename(folder.with_name(f"{name}.tmp"))

    def _watched(self, fd: int) -> None:
        self._fsync(fd)
        found = os.fstat(fd)
        self._flushed.add(_identity(found))
        if stat.S_ISDIR(found.st_mode) and found.st_ino == self._checkpoints.stat().st_ino:
            self._names = self._present()

    def _files(self) -> list[Path]:
        return [file for file in self._checkpoints.rglob("*") if file.is_file()]

    def _present(self) -> set[str]:
        return {folder.name for folder in self._checkpoints.glob("step-*") if not folder.suffix}


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_mtime_ns, found.st_size
