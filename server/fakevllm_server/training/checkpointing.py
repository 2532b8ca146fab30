"""When a run is saved, and what it goes on from: between the trainer, the folders it writes, and
the journal that knows them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence

from fakevllm_server.journal import changes, reads
from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.types.backend import ActionFailed, BackendRefused, Trainer

log = logging.getLogger("fakevllm.server")

KEEP = 3
"""The newest; the best one is kept beside them."""


class Checkpointer:
    def __init__(
        self, trainer: Trainer, folders: CheckpointFolders, journal: Journal, save_freq: int
    ) -> None:
        self._trainer = trainer
        self._folders = folders
        self._journal = journal
        self._save_freq = save_freq
        self._is_overdue = False
        self._rewards: list[float] = []
        """Of the steps since the last that is saved."""

    @property
    def last_step(self) -> int:
        """The last step that is saved."""
        return max((saved.step for saved in self._journal.read(reads.checkpoints)), default=0)

    async def restore(self) -> SavedCheckpoint | None:
        """The newest checkpoint that is whole and that the engine can read. Raises BackendRefused
        where that is none of those there are: to begin anew would be to throw a run away."""
        self._rewards = []
        known = self._journal.read(reads.checkpoints)
        self._folders.sweep([saved.folder for saved in known])
        for saved in known:
            try:
                folder = await asyncio.to_thread(self._folders.find, saved)
                await self._trainer.restore(folder)
            # Retried with the one before.
            except (OSError, ActionFailed) as failure:
                log.error("%s; trying the checkpoint before it", failure)
            else:
                return saved
        if known:
            raise BackendRefused(
                "no checkpoint of this run can be restored (the server's log says why): "
                "mend them, or choose another --run-dir"
            )
        return None

    async def save_if_due(
        self, step: int, version: int, metrics: Mapping[str, float], *, is_last: bool
    ) -> SavedCheckpoint | None:
        """A full disk costs a checkpoint, not the run: it is tried again after the next step.
        Raises what the trainer raises when it is lost."""
        if "reward_mean" in metrics:
            self._rewards.append(metrics["reward_mean"])
        if not (self._is_overdue or is_last or step % self._save_freq == 0):
            return None
        try:
            return await self.save(step, version)
        except (OSError, ActionFailed) as failure:
            self._is_overdue = True
            log.error(
                "step %d could not be saved, trying again after the next: %s",
                step,
                failure,
                extra={"step": step},
            )
            return None

    async def save(self, step: int, version: int) -> SavedCheckpoint:
        """A folder that counts once the journal knows it. Raises OSError or BackendError."""
        folder, digest = await self._folders.write(step, self._trainer.save)
        mean = sum(self._rewards) / len(self._rewards) if self._rewards else None
        return SavedCheckpoint(step, folder, version, digest, mean)

    async def kept(self, saved: SavedCheckpoint) -> None:
        """The journal knows it: older ones may go, and what was kept for them."""
        self._is_overdue, self._rewards = False, []
        known = self._journal.read(reads.checkpoints)
        kept = best(known)
        gone = [one for one in known[KEEP:] if one is not kept]
        oldest = known[:KEEP][-1].step
        await self._journal.write(changes.pruned([one.step for one in gone], oldest))
        for one in gone:
            await asyncio.to_thread(self._folders.remove, one.folder)


def best(known: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
    """That of the highest mean reward; of several, the newest."""

    def worth(one: SavedCheckpoint) -> tuple[float, int]:
        return (-math.inf if one.reward_mean is None else one.reward_mean, one.step)

    return max(known, key=worth, default=None)
