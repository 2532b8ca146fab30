"""Checkpoints on disk: written aside, flushed to disk, renamed. The journal knows which of them
are whole: a folder without a row there was never finished, and goes.

A folder named `*.tmp` is being written or removed and is no checkpoint.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.types.crash_points import crash_point

log = logging.getLogger("fakevllm.server")

CHUNK = 1 << 20


class CheckpointFolders:
    """The run directory's `checkpoints`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def is_empty(self) -> bool:
        return not any(self._folder.glob("step-*"))

    def sweep(self, known: Collection[str]) -> None:
        """Removes all but the folders of these names."""
        for folder in self._folder.iterdir():
            if folder.name not in known:
                self.remove(folder.name)

    async def write(self, step: int, save: Callable[[Path], Awaitable[None]]) -> tuple[str, str]:
        """Name and digest of the folder; `save` writes the trainer's own files. Raises OSError
        where the disk does not take it."""
        aside = self._folder / f"step-{step:08d}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        await save(aside)
        crash_point("save.written")
        return aside.stem, await asyncio.to_thread(self._seal, aside)

    def find(self, saved: SavedCheckpoint) -> Path:
        """The folder the trainer is restored from. Raises OSError where it is not what was
        written."""
        folder = self._folder / saved.folder
        if digest(folder) != saved.digest:
            raise OSError(f"checkpoint {folder} is not what was written")
        return folder

    def remove(self, name: str) -> None:
        """Renamed first, so that a crash in the middle leaves no half of a checkpoint behind. What
        cannot be removed is told, and costs no step: it is tried again at the next start."""
        doomed = self._folder / f"{name.removesuffix('.tmp').removesuffix('.old')}.old.tmp"
        try:
            _delete(doomed)
            if (self._folder / name).exists():
                (self._folder / name).rename(doomed)
            _delete(doomed)
        except OSError as error:
            log.error("%s cannot be removed: %s", self._folder / name, error.strerror)

    def _seal(self, aside: Path) -> str:
        for path in [*aside.rglob("*"), aside]:
            _sync(path)
        sealed = digest(aside)
        crash_point("save.synced")
        self.remove(aside.stem)  # of a step that was undone
        aside.rename(aside.with_suffix(""))
        _sync(self._folder)
        crash_point("save.renamed")
        return sealed


def digest(folder: Path, on_read: Callable[[int], object] = int) -> str:
    """Of the names and bytes of all its files; `on_read` hears of each number of bytes that was
    read. Raises OSError."""
    hashed = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder)).encode()
        hashed.update(len(name).to_bytes(8, "little") + name)
        hashed.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                hashed.update(chunk)
                on_read(len(chunk))
    return hashed.hexdigest()


def _delete(path: Path) -> None:
    """A folder, or a file that somebody left there. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
