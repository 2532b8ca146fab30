"""When a run is saved, and what it goes on from: between the trainer, its checkpoints and the run's
log."""

from __future__ import annotations

import logging

from fakevllm_server.backends.base import ActionFailed, BackendRefused, Trainer
from fakevllm_server.checkpoints import Checkpoint, Checkpoints
from fakevllm_server.runlog import RunLog

log = logging.getLogger("fakevllm.server")


class Saves:
    def __init__(
        self, trainer: Trainer, checkpoints: Checkpoints, runlog: RunLog, save_freq: int
    ) -> None:
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._log = runlog
        self._save_freq = save_freq
        self._is_overdue = False
        self.last_step = 0
        """The last step that is saved."""

    async def restore(self) -> Checkpoint | None:
        """The newest checkpoint that the engine can read. Raises BackendRefused where it can read
        none of those there are: to begin anew would be to throw a run away."""
        self.last_step = 0
        for checkpoint in self._checkpoints.newest_first():
            try:
                await self._trainer.restore(checkpoint.weights)
            # Retried with the one before.
            except ActionFailed as failure:
                log.error("%s; trying the checkpoint before it", failure)
            else:
                self.last_step = checkpoint.step
                return checkpoint
        if not self._checkpoints.is_empty:
            raise BackendRefused(
                "no checkpoint of this run can be restored (the server's log says why): "
                "mend them, or choose another --run-dir"
            )
        return None

    async def save(self, step: int, version: int) -> None:
        """Raises OSError or BackendError."""
        consumed = sorted(self._log.standing.trained)
        await self._checkpoints.write(step, version, consumed, self._trainer.save)
        self.last_step, self._is_overdue = step, False

    async def save_if_due(self, step: int, version: int, *, is_last: bool) -> None:
        """A full disk costs a checkpoint, not the run: it is tried again after the next step."""
        if not (self._is_overdue or is_last or step % self._save_freq == 0):
            return
        try:
            await self.save(step, version)
        except (OSError, ActionFailed) as failure:
            self._is_overdue = True
            log.error("step %d could not be saved, trying again after the next: %s", step, failure)
