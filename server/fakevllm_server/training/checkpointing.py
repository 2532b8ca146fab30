"""Save a run's checkpoints, restore the newest readable checkpoint, and delete checkpoints that are
no longer needed.

The trainer writes the files of a checkpoint. The module `run.checkpoints` creates and deletes the
folders. The journal (the server's SQLite file) records which checkpoints are complete.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from fakevllm_server.journal import reads, row_changes
from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.checkpoints import CheckpointFolders, folder_name
from fakevllm_server.types.backend import ActionFailed, BackendRefused, Trainer

log = logging.getLogger("fakevllm.server")

KEEP = 3
"""Number of newest checkpoints that are kept. The checkpoint with the highest mean reward is kept
too, and so is the best checkpoint from before the latest change of the reward hooks or the job. The
checkpoints of pinned versions (for example, of the released version) are also kept."""


class Checkpointer:
    """Decides when the trainer saves a checkpoint, and which checkpoints of the run are kept."""

    def __init__(
        self,
        trainer: Trainer,
        folders: CheckpointFolders,
        journal: Journal,
        save_freq: int,
        pinned: Callable[[], Collection[int]] = frozenset,
        keep_calls_s: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the object. `pinned` returns the versions whose checkpoints must be kept. The
        calls of a step are kept for at least `keep_calls_s` seconds after its weights were first
        served."""
        self._pinned = pinned
        self._keep_calls_s = keep_calls_s
        self._clock = clock
        self._trainer = trainer
        self._folders = folders
        self._journal = journal
        self._save_freq = save_freq
        self._is_overdue = False
        self._rewards: list[float] = []
        """Mean rewards of the steps since the last checkpoint."""

    @property
    def last_step(self) -> int:
        """Training step of the newest checkpoint, or 0 if the run has no checkpoint."""
        return max((saved.step for saved in self._journal.read(reads.checkpoints)), default=0)

    async def restore(self) -> SavedCheckpoint | None:
        """Load the newest checkpoint that is complete and that the trainer can read.

        Return the checkpoint, or None if the run has no checkpoint. If no checkpoint of the run can
        be read, raise BackendRefused. Without this error, training would begin again from the
        initial weights, and the run would be lost.
        """
        self._rewards = []
        known = self._journal.read(reads.checkpoints)
        self._folders.delete_except(self._journal.read(reads.checkpoint_folders))
        for saved in known:
            try:
                folder = await asyncio.to_thread(self._folders.find, saved)
                await self._trainer.restore(folder)
            # Retry with the checkpoint before it.
            except (OSError, ActionFailed) as failure:
                log.error("%s; trying the checkpoint before it", failure)
            else:
                return saved
        if known:
            raise BackendRefused(
                "no checkpoint of this run can be restored (the server's log says why): "
                "repair them, or choose another --run-dir"
            )
        return None

    async def save_if_due(
        self, step: int, version: int, metrics: Mapping[str, float], *, is_last: bool
    ) -> SavedCheckpoint | None:
        """Save a checkpoint if one is due. A checkpoint is due after every `save_freq` steps, after
        the last step, and after the step that follows a failed save.

        Return the checkpoint, or None if none was saved. A full disk does not end the run: the save
        is tried again after the next step. If the trainer dies, the trainer's error is raised.
        """
        if "reward_mean" in metrics:
            self._rewards.append(metrics["reward_mean"])
        if not (self._is_overdue or is_last or step % self._save_freq == 0):
            return None
        try:
            return await self.save(step, version)
        except (OSError, ActionFailed) as failure:
            self._is_overdue = True
            log.error(
                "step %d could not be saved; trying again after the next step: %s",
                step,
                failure,
                extra={"step": step},
            )
            return None

    async def save(self, step: int, version: int) -> SavedCheckpoint:
        """Write a checkpoint folder, and return its record for the journal. The checkpoint becomes
        valid when the caller writes the record to the journal (the server's SQLite file). Raises
        OSError if the disk fails. Raises BackendError if the trainer fails.
        """
        beside = {saved.folder for saved in self._journal.read(reads.side_checkpoints)}
        suffix = f"-v{version}" if folder_name(step) in beside else ""
        folder, digest = await self._folders.write(step, self._trainer.save, suffix)
        mean = sum(self._rewards) / len(self._rewards) if self._rewards else None
        return SavedCheckpoint(step, folder, version, digest, mean)

    def forget_rewards(self) -> None:
        """Leave all earlier steps out of the mean reward of the next checkpoint. Call this method
        when the reward hooks or the job changed. Rewards before and after such a change cannot be
        compared."""
        self._rewards = []

    async def steps_were_discarded(self) -> None:
        """Delete the folders of checkpoints that are no longer in the journal (the server's SQLite
        file). Call this method after the journal recorded that training went back to an earlier
        checkpoint."""
        self._is_overdue, self._rewards = False, []
        known = self._journal.read(reads.checkpoint_folders)
        await asyncio.to_thread(self._folders.delete_except, known)

    async def prune(self) -> None:
        """Delete old checkpoints. Also delete the captured calls (the recorded tokens of model
        calls) of steps that will never be trained again. Call this method after a new checkpoint
        was recorded."""
        self._is_overdue, self._rewards = False, []
        known = self._journal.read(reads.checkpoints)
        changes = [step for step, _ in self._journal.read(reads.reward_changes)]
        kept: list[SavedCheckpoint | None] = [*known[:KEEP]]
        kept += [best_checkpoint(known, changes), best_before_change(known, changes)]
        pinned = self._pinned()
        old = [one for one in known if one not in kept and one.version not in pinned]
        # The steps after an older checkpoint are not trained again from it: neither a rollback to a
        # pinned one needs their calls, nor a start for which no newer one can be read.
        last_step = min(known[:KEEP][-1].step, self._last_step_without_readers(known[0].step))
        await self._journal.write(row_changes.pruned([saved.step for saved in old], last_step))
        for saved in old:
            await asyncio.to_thread(self._folders.delete, saved.folder)

    def _last_step_without_readers(self, newest: int) -> int:
        """Return the last step whose calls no table of samples needs any more. `newest` is the step
        that was trained last, whose weights may not be served yet."""
        if not self._keep_calls_s:
            return newest
        recent = self._journal.read(reads.first_step_since, self._clock() - self._keep_calls_s)
        return min(newest, newest if recent is None else recent) - 1


def best_checkpoint(
    known: Sequence[SavedCheckpoint], changes: Sequence[int] = ()
) -> SavedCheckpoint | None:
    """Return the checkpoint with the highest mean reward, or None if there are no checkpoints. If
    several checkpoints have the highest reward, return the newest of them.

    `changes` are the steps at which the reward hooks or the job changed. Only checkpoints after the
    latest of these changes are compared, because earlier rewards may be on another scale.
    """

    def rank(saved: SavedCheckpoint) -> tuple[float, int]:
        return (-math.inf if saved.reward_mean is None else saved.reward_mean, saved.step)

    newest = max((saved.step for saved in known), default=0)
    since = last_change(changes, newest)
    return max((saved for saved in known if saved.step >= since), key=rank, default=None)


def best_before_change(
    known: Sequence[SavedCheckpoint], changes: Sequence[int]
) -> SavedCheckpoint | None:
    """Return the best checkpoint from before the latest change of the reward hooks or the job.
    Return None if there is no such checkpoint. See `best_checkpoint` for which checkpoint is the
    best.

    The server keeps this checkpoint on disk. Otherwise, a change of the hooks would cost the user
    the best weights.
    """
    newest = max((saved.step for saved in known), default=0)
    since = last_change(changes, newest)
    return best_checkpoint([saved for saved in known if saved.step < since], changes)


def last_change(changes: Sequence[int], step: int) -> int:
    """Return the largest number in `changes` that is at most `step`. Return 0 if there is none.
    `changes` are the steps at which the reward hooks or the job changed.

    >>> last_change([11, 31], 30), last_change([11, 31], 31), last_change([11, 31], 10)
    (11, 31, 0)
    """
    return max((change for change in changes if change <= step), default=0)
