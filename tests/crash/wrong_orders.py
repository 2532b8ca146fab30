"""Three servers that do the right things in the wrong order. The suite is only worth something if
it finds them out."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.journal.store import ACK_LIMIT_S, Journal
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.training.checkpointing import Checkpointer
from fakevllm_server.types import crash_points

SLOW_S = 1.0


def acknowledges_before_the_commit() -> None:
    before = Journal.wait_written

    async def wait_written(
        self: Journal, position: int, limit_s: float | None = ACK_LIMIT_S
    ) -> None:
        if limit_s is None:  # the training loop's own
            await before(self, position, None)

    Journal.wait_written = wait_written
    told = crash_points.on_pass

    def on_a_slow_disk(label: str) -> None:
        # Else the writer's crash might come before the acknowledgement.
        if label == "end_episode.before_commit":
            time.sleep(SLOW_S)
        if told is not None:
            told(label)

    crash_points.on_pass = on_a_slow_disk


def commits_what_is_not_flushed() -> None:
    def fsync(_: int) -> None:
        """Later."""

    os.fsync = fsync


def commits_before_the_rename() -> None:
    seal, after = CheckpointFolders.write, Checkpointer.prune
    sealed: list[Path] = []

    async def write(
        self: CheckpointFolders, step: int, save: Callable[[Path], Awaitable[None]]
    ) -> tuple[str, str]:
        name, digest = await seal(self, step, save)
        folder = self.find(SavedCheckpoint(step, name, 0, digest, None))
        sealed.append(folder.rename(folder.with_suffix(".tmp")))
        return name, digest

    async def prune(self: Checkpointer) -> None:
        while sealed:
            folder = sealed.pop()
            folder.rename(folder.with_suffix(""))
        await after(self)

    CheckpointFolders.write, Checkpointer.prune = write, prune


ALL = {
    one.__name__: one
    for one in (
        acknowledges_before_the_commit,
        commits_what_is_not_flushed,
        commits_before_the_rename,
    )
}
