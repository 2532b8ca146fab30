"""Serve the run's latest weights. A new engine loads the latest weights when it starts, and each
step's new weights are published.

If the trainer refuses the job (the settings of the training), the engine serves the latest weights
that are available, and nothing is trained.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.episodes.states import EngineLifecycle
from fakevllm_server.fleet.rollout import FleetRollout
from fakevllm_server.journal.reads import PlannedBatch
from fakevllm_server.run.log import RunLog
from fakevllm_server.training.checkpointing import Checkpointer
from fakevllm_server.training.step import StepRunner
from fakevllm_server.training.weight_probe import MixedWeights, WeightProbe
from fakevllm_server.types.backend import Backend, BackendError, BackendRefused, BackendStart
from fakevllm_server.types.crash_points import crash_point

log = logging.getLogger("fakevllm.server")


class Publisher:
    """Loads the run's latest weights into a new engine, and publishes the new weights after each
    step."""

    def __init__(
        self,
        job: TrainJob,
        engine: EngineLifecycle,
        backend: Backend,
        runlog: RunLog,
        checkpointer: Checkpointer,
        steps: StepRunner,
        distrust: Callable[[int], Awaitable[None]],
    ) -> None:
        """Create the publisher. If the engine had wrong weights under a version number, `distrust`
        is awaited with this number. Answers of this version are then not trained."""
        self._job = job
        self._engine = engine
        self._backend = backend
        self._log = runlog
        self._checkpointer = checkpointer
        self._steps = steps
        self._distrust = distrust
        self._probe = WeightProbe(backend)
        self._next_trusted = 0
        """Lowest version that may be published next. Lower numbers are not used again, because the
        engine had wrong weights under the number just below this one."""
        self._was_lost = False
        """Whether the rollout engine was stopped because it had wrong weights, and no engine has
        had the right weights since."""
        self.refusal: str | None = None
        """Reason why the trainer does not train, although the engine's calls could be trained on.
        None if the trainer trains."""

    async def catch_up(self, started: BackendStart) -> None:
        """Serve the latest weights of the run after an engine start, and prepare the trainer for
        the next step."""
        if started.trainer_is_new:
            self._steps.is_in_sync = False
        self.refusal = None
        if started.refusal is not None:
            self._refuse(started.refusal)
        if started.endpoint.refusal is not None:
            await self._catch_up_untrainable(started.endpoint.refusal)
        elif self.refusal is None:
            await self._catch_up()

    def _refuse(self, reason: str) -> None:
        """Stop training for a reason that the user must fix. The engine continues to serve."""
        self.refusal = reason
        log.error("%s", self.refusal_message)

    @property
    def refusal_message(self) -> str | None:
        """Message for users that says why nothing is trained, and how to fix the cause. None if
        training is possible."""
        if self.refusal is None:
            return None
        return (
            f"training is off, serving goes on: {self.refusal}. Fix the cause, then stop the "
            "server and the proxy, and start both again"
        )

    async def publish(self, version: int) -> None:
        """Serve the trainer's weights from now on, and record that they are served as `version`.

        The engine's weights are then compared with the trainer's. If they differ, the trainer's
        weights are loaded once more, as the next version. If the second attempt also fails,
        replicas with wrong weights are taken out, and the others get the next version. If no
        replica has the right weights, the rollout engine is stopped, and BackendError is raised. If
        the previous engine was already stopped for this reason, the new engine keeps serving, and
        training stops instead.
        """
        version = max(version, self._next_trusted)
        crash_point("publish.before")
        await self._publish(version)
        problem = await self._problem(version)
        if problem is not None:
            log.error("%s: the weights of version %d are loaded once more", problem, version)
            version = await self._publish_next(version)
            problem = await self._problem(version)
        if problem is not None and self._take_out_wrong_replicas():
            version = await self._publish_next(version)
            problem = await self._problem(version)
        if problem is not None:
            await self._give_up_engine(version, problem)
        self._was_lost = self._was_lost and problem is not None
        self._engine.version = version
        if version:
            await self._log.record_publication(version, self._log.last_step)

    async def _publish_next(self, version: int) -> int:
        """Publish the trainer's weights again, as the next version. Answers of `version` are not
        trained, because at least one engine had wrong weights under this number. Return the next
        version."""
        await self._distrust_version(version)
        await self._publish(self._next_trusted)
        return self._next_trusted

    def _take_out_wrong_replicas(self) -> bool:
        """Take out the replicas that had wrong weights in the latest probe. They are started again.
        Return False if there are none, or if no replica had the right weights."""
        wrong = self._probe.wrong_replicas
        if not wrong:
            return False
        rollout = self._backend.rollout
        assert isinstance(rollout, FleetRollout), "only a fleet has replicas"
        for name, result in wrong.items():
            rollout.take_out(name, f"it has other weights than the trainer: {result}")
        return True

    async def _publish(self, version: int) -> None:
        """Load the trainer's weights into the rollout engine as `version`. If the run log does not
        have this version, record the version first."""
        if version > self._log.version:
            await self._log.record_reload(version)
        await self._backend.publish(version)

    async def go_back(self, folder: Path, step: int, record: Callable[[], Awaitable[None]]) -> None:
        """Restore a checkpoint of an earlier step into the running trainer, and serve the
        checkpoint's weights. The steps after this earlier step are not trained again. `record` is
        called to write to the journal that training went back.

        Raises ActionFailed if the checkpoint cannot be restored. In this case, nothing is recorded,
        and the trainer must be started again, because a part of its weights may have changed.
        """
        self._steps.is_in_sync = False
        await self._backend.trainer.restore(folder)
        crash_point("go_back.restored")
        await record()
        await self._checkpointer.steps_were_discarded()
        self._steps.steps_were_discarded()
        self._steps.resume([])
        self._engine.global_step = step + 1
        await self.publish(self._log.version)

    async def _problem(self, version: int) -> str | None:
        """Compare the weights that the engine serves as `version` with the trainer's weights.
        Return the problem as text if the two are known to differ. Return None otherwise."""
        if self.refusal is not None:
            return None
        try:
            result = await self._probe.run(version)
        except MixedWeights as mixed:  # translated: apps are still served
            self._refuse(str(mixed))
            return None
        if result is None or result.is_same:
            return None
        if not self._probe.has_passed:
            # The two have never agreed, so what differs may be how they compute.
            self._probe.switch_off(f"already at the first answer, {result}")
            return None
        wrong = ", ".join(self._probe.wrong_replicas) or "the rollout engine"
        return f"{wrong} has other weights than the trainer: {result}"

    async def _distrust_version(self, version: int) -> None:
        await self._distrust(version)
        self._next_trusted = version + 1

    async def _give_up_engine(self, version: int, problem: str) -> None:
        """Handle a rollout engine that still has other weights than the trainer after two attempts.

        The first time, the engine is stopped and BackendError is raised, so that a new engine is
        started. If the new engine has the same problem, it is kept for the apps, and nothing is
        trained.
        """
        await self._distrust_version(version)
        if self._was_lost:
            return self._refuse(f"{problem}, also after a restart of the engine")
        self._was_lost = True
        await self._backend.close_rollout()
        raise BackendError(problem)

    async def _catch_up_untrainable(self, refusal: str) -> None:
        log.error("nothing is trained: %s", refusal)
        if self._log.version == 0:
            return
        try:
            await self._catch_up()
        except BackendError as failure:
            log.error("the engine serves the model as it was before training: %s", failure)

    async def _catch_up(self) -> None:
        try:
            await (self._publish_latest() if self._steps.is_in_sync else self._restore())
        # No checkpoint can be read. Starting from scratch would discard the run.
        except BackendRefused as refused:
            if self.refusal is None:
                self._refuse(str(refused))
            else:  # a consequence of the earlier refusal
                log.error("the engine serves the model as it was before training: %s", refused)

    async def _publish_latest(self) -> None:
        """Publish the trainer's latest weights to a rollout engine that does not have them yet."""
        self._engine.global_step = self._log.last_step + 1
        await self.publish(max(self._log.version, self._engine.version))

    async def _restore(self) -> None:
        """Load the newest checkpoint into a new trainer, and serve the checkpoint's weights. The
        steps after the checkpoint are trained again.

        The checkpoint is loaded before the trainer gets the job (the settings of the training). The
        checkpoint's weights are therefore served even if the trainer refuses the job.
        """
        checkpoint = await self._checkpointer.restore()
        try:
            await self._backend.trainer.boot(self._job)
        except BackendRefused as refused:
            self._refuse(str(refused))
        step = 0 if checkpoint is None else checkpoint.step
        # Weights change only by training and publishing. A first start has neither and stays at 0.
        known = max(self._log.version, self._engine.version)
        version = known + 1 if known or step else 0
        batches = await self._log.record_rollback(step, version)
        if batches:
            log.warning("restored step %d; training steps %s again", step, _range(batches))
        await self.publish(version)
        self._engine.global_step = step + 1
        if self.refusal is None:
            self._steps.resume(batches)


def _range(batches: list[PlannedBatch]) -> str:
    first, last = batches[0].step, batches[-1].step
    return f"{first}" if first == last else f"{first} to {last}"
