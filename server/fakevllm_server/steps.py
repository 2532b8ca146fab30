"""One training step: groups out of the pool, an update of the trainer, a line in the run's log."""

from __future__ import annotations

import logging
import time

from fakevllm_adapters.train_job import TrainJob
from fakevllm_server.backends.base import ActionFailed, LossSpec, StepMetrics, Trainer
from fakevllm_server.batch import PlannedStep, plan_step
from fakevllm_server.calls import FinishedGroup
from fakevllm_server.engine import Engine
from fakevllm_server.pool import Pool
from fakevllm_server.runlog import RunLog

log = logging.getLogger("fakevllm.server")

MAX_FAILURES = 3
"""Tries at one step before its groups are dropped."""
RETRY_STEP_AFTER_S = 1.0
"""Longer than a crashing engine takes to end, so that its death is not taken for failed steps."""


class StepFailed(Exception):
    """A step could not be made, and that is not the engine's end."""


class Steps:
    def __init__(
        self, job: TrainJob, engine: Engine, pool: Pool, trainer: Trainer, runlog: RunLog
    ) -> None:
        self._job = job
        self._engine = engine
        self._pool = pool
        self._trainer = trainer
        self._log = runlog
        self._num_failed = 0
        self._retry_at = 0.0
        self.is_whole = False
        """Whether the trainer's weights are those of the steps in the log."""

    def is_due(self, now: float) -> bool:
        is_ready = self.is_whole and now >= self._retry_at
        return is_ready and self._pool.num_finished >= self._job.batch_size

    async def make(self) -> int | None:
        """The version of the new weights, which are not published yet; None where no step came
        about. Raises what the trainer raises when it is lost."""
        step = self._engine.global_step
        taken = self._pool.take(self._job.batch_size, self._engine.version, self._job.max_staleness)
        self._log.dropped(step, taken.dropped)
        if len(taken.groups) < self._job.batch_size:
            self._pool.put_back(taken.groups)
            return None
        try:
            version = await self._train(step, taken.groups)
        except StepFailed as failure:
            log.error("step %d failed, the engine goes on: %s", step, failure)
            self._retry_at = time.monotonic() + RETRY_STEP_AFTER_S
            self._give_back(step, taken.groups)
            return None
        except BaseException:
            self._give_back(step, taken.groups)
            raise
        self._num_failed = 0
        return version

    async def _train(self, step: int, groups: list[FinishedGroup]) -> int:
        """The log knows the version before any call can carry it."""
        plan = self._plan(step, groups)
        self.is_whole = False
        metrics = await self._update(plan)
        version = self._engine.next_version()
        self._record(plan, metrics, version)
        self.is_whole = True
        return version

    def _plan(self, step: int, groups: list[FinishedGroup]) -> PlannedStep:
        # Translated: rewards no arithmetic can take are these groups' trouble, not the engine's.
        try:
            return plan_step(step, groups, self._job)
        except Exception as failure:
            raise StepFailed(f"its groups cannot be compared: {failure!r}") from failure

    async def _update(self, plan: PlannedStep) -> StepMetrics:
        try:
            return await self._trainer.step(plan.batch, LossSpec.of(self._job))
        # Nothing was trained then: a step that fails half way is a plain BackendError.
        except ActionFailed as failure:
            self.is_whole = True
            raise StepFailed(str(failure)) from failure

    def _give_back(self, step: int, groups: list[FinishedGroup]) -> None:
        """Groups of a step that failed are tried again, unless they seem to be what makes it
        fail."""
        recorded = self._log.standing.trained
        untrained = [group for group in groups if group.group_id not in recorded]
        self._num_failed += 1
        if self._num_failed < MAX_FAILURES:
            self._pool.put_back(untrained)
        else:
            self._num_failed = 0
            self._log.dropped(step, {group.group_id: "step_failed" for group in untrained})

    def _record(self, plan: PlannedStep, metrics: StepMetrics, version: int) -> None:
        step = plan.batch.step
        self._log.trained(step, version, plan.trained, plan.metrics | metrics)
        shown = " ".join(f"{key}={value:.4g}" for key, value in (plan.metrics | metrics).items())
        log.info("step %d version %d %s", step, version, shown)
