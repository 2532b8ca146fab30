"""One training step: groups out of the pool, an update of the trainer, a line in the run's log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from fakevllm_adapters.train_job import TrainJob
from fakevllm_server.backends.base import ActionFailed, LossSpec, StepMetrics, Trainer
from fakevllm_server.batch import PlannedStep, plan_step, with_left_out
from fakevllm_server.branches import branches
from fakevllm_server.calls import FinishedGroup
from fakevllm_server.coverage import coverage, nothing_trained
from fakevllm_server.engine import Engine
from fakevllm_server.forest.history import Vocabulary
from fakevllm_server.pool import Pool
from fakevllm_server.reward_kl import reward_penalties
from fakevllm_server.runlog import RunLog
from fakevllm_server.step_line import not_finite, shown, step_line
from fakevllm_server.stop_limit import StopLimit

log = logging.getLogger("fakevllm.server")

MAX_FAILURES = 3
"""Tries at one step before its groups are dropped."""
RETRY_STEP_AFTER_S = 1.0
"""Longer than a crashing engine takes to end, so that its death is not taken for failed steps."""


class StepFailed(Exception):
    """A step could not be made, and that is not the engine's end."""


class Steps:
    def __init__(
        self,
        job: TrainJob,
        engine: Engine,
        pool: Pool,
        trainer: Trainer,
        runlog: RunLog,
        vocabulary: Callable[[], Vocabulary] = Vocabulary,
    ) -> None:
        """`vocabulary` names why sessions branch; it may take its time and is asked in a thread."""
        self._job = job
        self._engine = engine
        self._pool = pool
        self._trainer = trainer
        self._log = runlog
        self._vocabulary = vocabulary
        self._limit = StopLimit()
        self._num_failed = 0
        self._retry_at = 0.0
        self.is_whole = False
        """Whether the trainer's weights are those of the steps in the log."""

    @property
    def stopped(self) -> str | None:
        """Why no more steps will be taken; None while they will."""
        return self._limit.reason

    def is_due(self, now: float) -> bool:
        return self.is_whole and now >= self._retry_at and self._pool.is_due

    async def make(self) -> int | None:
        """The version of the new weights, which are not published yet; None where no step came
        about. Raises what the trainer raises when it is lost."""
        step = self._engine.global_step
        taken = self._pool.take(self._engine.version)
        self._log.dropped(step, taken.dropped)
        if not taken.groups:
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
        plan = self._plan(step, groups, await self._penalties(groups))
        covered = _covered(plan, groups)
        beside = asyncio.create_task(asyncio.to_thread(self._branches, groups))
        self.is_whole = False
        try:
            metrics = await self._update(plan)
            metrics = covered | await beside | metrics
        finally:
            beside.cancel()
        version = self._engine.next_version()
        self._record(plan, metrics, version)
        self.is_whole = True
        return version

    def _branches(self, groups: list[FinishedGroup]) -> StepMetrics:
        # Isolated: the names of causes are not worth a step.
        try:
            return branches(groups, self._vocabulary())
        except Exception:
            log.exception("why sessions branched could not be told")
            return {}

    async def _penalties(self, groups: list[FinishedGroup]) -> list[list[float]] | None:
        try:
            return await reward_penalties(self._trainer, groups, self._job)
        except ActionFailed as failure:
            raise StepFailed(str(failure)) from failure

    def _plan(
        self, step: int, groups: list[FinishedGroup], penalties: list[list[float]] | None
    ) -> PlannedStep:
        # Translated: rewards no arithmetic can take are these groups' trouble, not the engine's.
        try:
            return plan_step(step, groups, self._job, penalties)
        except Exception as failure:
            raise StepFailed(f"its groups cannot be compared: {failure!r}") from failure

    async def _update(self, plan: PlannedStep) -> StepMetrics:
        # What is served are the trainer's weights: nothing has been trained since the publish.
        batch = replace(plan.batch, version=self._engine.version)
        try:
            return await self._trainer.step(batch, LossSpec.of(self._job))
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

    def _record(self, plan: PlannedStep, measured: StepMetrics, version: int) -> None:
        step = plan.batch.step
        metrics = with_left_out(plan.metrics, self._pool.take_left_out()) | measured
        trained = plan.trained
        if metrics.get("no_update"):
            metrics = nothing_trained(
                metrics, "too_far" if metrics.get("too_far") else "not_finite"
            )
            metrics |= {"feedback_tokens": 0.0} if "feedback_tokens" in metrics else {}
            trained = [one.model_copy(update={"siblings": []}) for one in trained]
        self._log.trained(step, version, trained, metrics)
        log.info("%s", step_line(step, version, metrics))
        self._watch(step, metrics)

    def _watch(self, step: int, metrics: Mapping[str, float]) -> None:
        limit = self._job.max_mismatch_k3
        if metrics.get("too_far"):
            told = (step, shown(metrics, "mismatch_k3", ".3g"), limit)
            log.error("step %d made no update: mismatch_k3 %s is above max_mismatch_k3 %s", *told)
        elif metrics.get("skipped"):
            made = "no update" if metrics.get("no_update") else "not all of its updates"
            log.error("step %d made %s: %s", step, made, not_finite(metrics) or "not finite")
        self._limit.saw(step, metrics, limit)
        if self.stopped is not None:
            log.error("%s", self.stopped)
            self._log.stopped(step, self.stopped)


def _covered(plan: PlannedStep, groups: list[FinishedGroup]) -> StepMetrics:
    """What is trained of the groups' tokens, and beside them of feedback samples'."""
    covered = coverage(groups, plan.batch.calls)
    if "feedback_samples" not in plan.metrics:
        return covered
    of_samples = plan.metrics["tokens_trained"] - covered["tokens_trained"]
    return covered | {"feedback_tokens": of_samples}
