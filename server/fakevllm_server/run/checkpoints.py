"""The folders of a run's checkpoints.

A checkpoint is written in four steps. It is written to a folder with a temporary name, flushed to
disk, renamed, and then recorded in the journal (the run's SQLite file). A folder that is not in the
journal is incomplete and is deleted at the next start. A folder named `*.tmp` is a checkpoint that
is being written or deleted.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from fakevllm_runtime.errors import ConfigError
from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.types.crash_points import crash_point

log = logging.getLogger("fakevllm.server")

CHUNK = 1 << 20
"""Bytes that `digest` reads at a time."""


class CheckpointFolders:
    """The folder `checkpoints` of a run directory."""

    def __init__(self, folder: Path) -> None:
        """Create the folder `checkpoints` if it does not exist. Raises ConfigError if it cannot be
        used."""
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be used ({error.strerror}): move it away, or choose another "
                "--run-dir."
            ) from None

    @property
    def is_empty(self) -> bool:
        """Whether the folder `checkpoints` of the run contains no checkpoint, not even an
        incomplete one."""
        return not any(self._folder.glob("step-*"))

    def delete_except(self, names: Collection[str]) -> None:
        """Delete everything in the folder `checkpoints` except the entries with these names."""
        for folder in self._folder.iterdir():
            if folder.name not in names:
                self.delete(folder.name)

    async def write(
        self, step: int, save: Callable[[Path], Awaitable[None]], suffix: str = ""
    ) -> tuple[str, str]:
        """Write the checkpoint of a training step. Return the name of its folder and the SHA-256
        digest of its files.

        `save` is a function that writes the trainer's files into a given folder. If another
        checkpoint of the same step is kept, `suffix` makes the name of the new folder different.
        Raises OSError if the disk fails or is full.
        """
        temporary = self._folder / f"{folder_name(step)}{suffix}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700)
        await save(temporary)
        crash_point("save.written")
        return temporary.stem, await asyncio.to_thread(self._sync_and_rename, temporary)

    def find(self, saved: SavedCheckpoint) -> Path:
        """Return the folder of a saved checkpoint, after checking the SHA-256 of its files.

        Raises OSError if the files are missing or have changed since they were written.
        """
        folder = self._folder / saved.folder
        if digest(folder) != saved.digest:
            raise OSError(f"checkpoint {folder} is damaged: its files are not those written")
        return folder

    def delete(self, name: str) -> None:
        """Delete a folder or file in the folder `checkpoints` of the run.

        The entry is renamed first. Therefore a crash leaves no partly deleted checkpoint under the
        original name. If the deletion fails, an error is logged, and the next start of the server
        deletes the entry.
        """
        renamed = self._folder / f"{name.removesuffix('.tmp').removesuffix('.old')}.old.tmp"
        try:
            _delete(renamed)
            if (self._folder / name).exists():
                (self._folder / name).rename(renamed)
            _delete(renamed)
        except OSError as error:
            log.error("%s cannot be removed: %s", self._folder / name, error.strerror)

    def _sync_and_rename(self, temporary: Path) -> str:
        """Flush a new checkpoint to disk, rename its folder to the final name, and return the
        digest of its files."""
        for path in [*temporary.rglob("*"), temporary]:
            _sync(path)
        folder_digest = digest(temporary)
        crash_point("save.synced")
        self.delete(temporary.stem)  # the same step's checkpoint, if the step was rolled back
        temporary.rename(temporary.with_suffix(""))
        _sync(self._folder)
        crash_point("save.renamed")
        return folder_digest


def folder_name(step: int) -> str:
    """Return the usual name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def digest(folder: Path, on_read: Callable[[int], object] = int) -> str:
    """Return the SHA-256 of the names, sizes and contents of all files below a folder.

    `on_read` is called with the size of each chunk that was read, in bytes. Raises OSError if a
    file cannot be read.
    """
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
    """Delete a folder, or a file that the user left among the checkpoints. Raises OSError if the
    deletion fails."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
