"""Three faulty servers, which do the right actions in the wrong order.

The crash suite must detect each of them."""

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
    original = Journal.wait_written

    async def wait_written(
        self: Journal, position: int, limit_s: float | None = ACK_LIMIT_S
    ) -> None:
        if limit_s is None:  # only the training loop waits without a limit
            await original(self, position, None)

    Journal.wait_written = wait_written
    previous = crash_points.on_pass

    def pass_slowly(label: str) -> None:
        # Delay the writer's crash, so that the acknowledgement is sent before it.
        if label == "end_episode.before_commit":
            time.sleep(SLOW_S)
        if previous is not None:
            previous(label)

    crash_points.on_pass = pass_slowly


def commits_before_the_flush() -> None:
    def fsync(_: int) -> None:
        """Return without flushing the file."""

    os.fsync = fsync


def commits_before_the_rename() -> None:
    original_write, original_prune = CheckpointFolders.write, Checkpointer.prune
    unnamed: list[Path] = []

    async def write(
        self: CheckpointFolders,
        step: int,
        save: Callable[[Path], Awaitable[None]],
        suffix: str = "",
    ) -> tuple[str, str]:
        name, digest = await original_write(self, step, save, suffix)
        folder = self.find(SavedCheckpoint(step, name, 0, digest, None))
        unnamed.append(folder.rename(folder.with_suffix(".tmp")))
        return name, digest

    async def prune(self: Checkpointer) -> None:
        while unnamed:
            folder = unnamed.pop()
            folder.rename(folder.with_suffix(""))
        await original_prune(self)

    CheckpointFolders.write, Checkpointer.prune = write, prune


ALL = {
    fault.__name__: fault
    for fault in (
        acknowledges_before_the_commit,
        commits_before_the_flush,
        commits_before_the_rename,
    )
}
