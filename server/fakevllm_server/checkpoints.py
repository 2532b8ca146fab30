"""Checkpoints on disk: written aside, flushed to disk, renamed; the last few kept."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import orjson

KEEP = 3


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder the trainer can be restored from."""

    folder: Path
    step: int
    """The last step in it."""

    @property
    def weights(self) -> Path:
        return self.folder / "trainer"


class Checkpoints:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in folder.glob("*.tmp"):
            shutil.rmtree(leftover)

    def latest(self) -> Checkpoint | None:
        return max(self._all(), key=lambda checkpoint: checkpoint.step, default=None)

    async def write(
        self, step: int, version: int, consumed: list[str], save: Callable[[Path], Awaitable[None]]
    ) -> None:
        """`save` writes the trainer's own files; `consumed` are the ids of all groups trained so
        far."""
        aside = self._folder / f"step-{step:08d}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        (aside / "trainer").mkdir(parents=True)
        await save(aside / "trainer")
        state = {"step": step, "version": version, "consumed_groups": consumed}
        (aside / "state.json").write_bytes(orjson.dumps(state))
        await asyncio.to_thread(self._seal, aside, step)

    def _seal(self, aside: Path, step: int) -> None:
        for path in [*aside.rglob("*"), aside]:
            _sync(path)
        final = aside.with_suffix("")
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        _sync(self._folder)
        for old in sorted(self._all(), key=lambda checkpoint: checkpoint.step)[:-KEEP]:
            shutil.rmtree(old.folder)

    def _all(self) -> list[Checkpoint]:
        states = self._folder.glob("step-*/state.json")
        return [Checkpoint(path.parent, orjson.loads(path.read_bytes())["step"]) for path in states]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
