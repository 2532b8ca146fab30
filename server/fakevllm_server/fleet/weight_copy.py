"""The fleet's current weights, kept as a folder for replicas that are started again.

The publisher removes its folder after each publish. Hard links keep the files, so that the copy
needs no time and, until the next export, no further memory.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path


class WeightCopy:
    """A folder with the weights that were published last, and their version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.version: int | None = None
        """Version of the kept weights; None if no weights are kept."""

    @property
    def folder(self) -> Path:
        return self._folder

    async def keep(self, source: Path, version: int) -> None:
        """Replace the kept weights by those in the folder `source`. Raises OSError if the copy
        fails. The earlier weights are then still kept."""
        new = self._folder.with_name(f"{self._folder.name}-new")
        await asyncio.to_thread(shutil.rmtree, new, ignore_errors=True)
        try:
            await asyncio.to_thread(_link_tree, source, new)
        except OSError:
            await asyncio.to_thread(shutil.rmtree, new, ignore_errors=True)
            raise
        await self.remove()
        new.rename(self._folder)
        self.version = version

    async def remove(self) -> None:
        self.version = None
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


def _link_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=_link_or_copy)
    target.chmod(0o700)


def _link_or_copy(source: str, target: str) -> None:
    """Link a file, or copy it if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
