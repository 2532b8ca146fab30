"""Checkpoints on disk: written aside, flushed to disk, renamed; the last few kept.

A folder named `*.tmp` is being written or removed and is no checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

log = logging.getLogger("fakevllm.server")

KEEP = 3


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder the trainer can be restored from."""

    folder: Path
    step: int
    """The last step in it."""
    version: int = 0
    """Of its weights, when they were published."""
    consumed: Sequence[str] = ()
    """Ids of all groups trained up to it."""

    @property
    def weights(self) -> Path:
        return self.folder / "trainer"


class Checkpoints:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in folder.glob("*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    @property
    def is_empty(self) -> bool:
        """Whether there is none at all, not even one that cannot be read."""
        return not self._folders()

    def newest_first(self) -> list[Checkpoint]:
        """Those whose state can be read; the others are told in the log and passed over."""
        found = [_read(folder) for folder in reversed(self._folders())]
        return [checkpoint for checkpoint in found if checkpoint is not None]

    async def write(
        self, step: int, version: int, consumed: list[str], save: Callable[[Path], Awaitable[None]]
    ) -> None:
        """`save` writes the trainer's own files; `consumed` are the ids of all groups trained so
        far. Raises OSError where the disk does not take it."""
        aside = self._folder / f"step-{step:08d}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        (aside / "trainer").mkdir(parents=True)
        await save(aside / "trainer")
        state = {"step": step, "version": version, "consumed_groups": consumed}
        (aside / "state.json").write_bytes(orjson.dumps(state))
        await asyncio.to_thread(self._seal, aside)

    def _seal(self, aside: Path) -> None:
        for path in [*aside.rglob("*"), aside]:
            _sync(path)
        final = aside.with_suffix("")
        if final.exists():
            _remove(final)
        aside.rename(final)
        _sync(self._folder)
        for old in self._folders()[:-KEEP]:
            _remove(old)

    def _folders(self) -> list[Path]:
        """Oldest first: the step in the name is padded."""
        return sorted(path for path in self._folder.glob("step-*") if path.suffix != ".tmp")


def _read(folder: Path) -> Checkpoint | None:
    try:
        state: Any = orjson.loads((folder / "state.json").read_bytes())
        return Checkpoint(folder, state["step"], state["version"], state["consumed_groups"])
    except (OSError, ValueError, KeyError, TypeError) as failure:
        log.error("checkpoint %s cannot be read and is passed over: %r", folder, failure)
        return None


def _remove(folder: Path) -> None:
    """Renamed first, so that a crash in the middle leaves no half of a checkpoint behind."""
    doomed = folder.with_name(f"{folder.name}.old.tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
