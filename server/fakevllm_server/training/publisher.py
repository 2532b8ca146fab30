"""The weights a run has come to: brought into an engine that was started, served after each step.

Where a trainer refuses, the engine serves the last weights it can be given, and nothing is trained.
"""

from __future__ import annotations

import logging

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.episodes.states import EngineLifecycle
from fakevllm_server.journal.reads import PlannedBatch
from fakevllm_server.run.log import RunLog
from fakevllm_server.training.checkpointing import Checkpointer
from fakevllm_server.training.step import StepRunner
from fakevllm_server.types.backend import Backend, BackendError, BackendRefused, BackendStart
from fakevllm_server.types.crash_points import crash_point

log = logging.getLogger("fakevllm.server")


class Publisher:
    def __init__(
        self,
        job: TrainJob,
        engine: EngineLifecycle,
        backend: Backend,
        runlog: RunLog,
        saves: Checkpointer,
        steps: StepRunner,
    ) -> None:
        self._job = job
        self._engine = engine
        self._backend = backend
        self._log = runlog
        self._saves = saves
        self._steps = steps
        self.refusal: str | None = None
        """Why there is no trainer, or none that takes this job; None where there is."""

    async def bring(self, started: BackendStart) -> None:
        """What was trained is served, and the next step goes on from there."""
        if started.trainer_is_new:
            self._steps.is_whole = False
        self.refusal = started.refusal
        if started.endpoint.refusal is not None:
            await self._bring_to_untrainable(started.endpoint.refusal)
        elif self.refusal is None:
            await self._bring()
        if self.refusal is not None:
            log.error("%s", self.detail)

    @property
    def detail(self) -> str | None:
        """What is told of a refusal."""
        if self.refusal is None:
            return None
        return (
            f"training is off, serving goes on: {self.refusal}. Mend it, then end the server and "
            "the proxy, and start both again"
        )

    async def publish(self, version: int) -> None:
        crash_point("publish.before")
        await self._backend.publish(version)
        self._engine.version = version
        if version:
            await self._log.record_publication(version, self._log.last_step)

    async def _bring_to_untrainable(self, refusal: str) -> None:
        log.error("nothing is trained: %s", refusal)
        if self._log.version == 0:
            return
        try:
            await self._bring()
        except BackendError as failure:
            log.error("it serves the model as it was before training: %s", failure)

    async def _bring(self) -> None:
        try:
            await (self._catch_up() if self._steps.is_whole else self._restore())
        # No checkpoint can be read: to begin anew would be to throw a run away.
        except BackendRefused as refused:
            self.refusal = str(refused)

    async def _catch_up(self) -> None:
        """The trainer has gone on to where the log ends; its weights have not arrived."""
        self._engine.global_step = self._log.last_step + 1
        await self.publish(max(self._log.version, self._engine.version))

    async def _restore(self) -> None:
        """A new trainer takes the newest checkpoint; what was trained since it will train again.
        The job comes after the checkpoint, whose weights are served also where it is refused."""
        checkpoint = await self._saves.restore()
        try:
            await self._backend.trainer.boot(self._job)
        except BackendRefused as refused:
            self.refusal = str(refused)
        step = 0 if checkpoint is None else checkpoint.step
        # Weights move only by training and publishing: a first start has neither, and stays 0.
        known = max(self._log.version, self._engine.version)
        version = known + 1 if known or step else 0
        batches = await self._log.record_rollback(step, version)
        if batches:
            log.warning("restored step %d; to be trained again: steps %s", step, _span(batches))
        await self.publish(version)
        self._engine.global_step = step + 1
        if self.refusal is None:
            self._steps.resume(batches)


def _span(batches: list[PlannedBatch]) -> str:
    first, last = batches[0].step, batches[-1].step
    return f"{first}" if first == last else f"{first} to {last}"
