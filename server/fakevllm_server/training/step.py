"""One training step: groups out of the pool, an update of the trainer, a line in the run's log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.packed_numbers import jsonable_numbers
from fakevllm_server.algorithms.staleness import keep_fresh
from fakevllm_server.episodes.pool import Pool
from fakevllm_server.episodes.states import EngineLifecycle
from fakevllm_server.forest.history import Vocabulary
from fakevllm_server.journal.reads import PlannedBatch
from fakevllm_server.run.coverage import coverage, without_update
from fakevllm_server.run.log import RunLog
from fakevllm_server.training.batch import PlannedStep, branches, plan_step, with_left_out
from fakevllm_server.training.checkpointing import Checkpointer
from fakevllm_server.training.guards import MismatchStop
from fakevllm_server.training.reward_kl import reward_penalties
from fakevllm_server.training.step_log import DROPPED, not_finite, shown, step_line
from fakevllm_server.types.backend import ActionFailed, LossSpec, StepMetrics, Trainer
from fakevllm_server.types.calls import FinishedGroup
from fakevllm_server.types.crash_points import crash_point

log = logging.getLogger("fakevllm.server")

MAX_FAILURES = 3
"""Tries at one step before its groups are dropped."""
RETRY_STEP_AFTER_S = 1.0
"""Longer than a crashing engine takes to end, so that its death is not taken for failed steps."""


class StepFailed(Exception):
    """A step could not be made, and that is not the engine's end."""


class StepRunner:
    def __init__(
        self,
        job: TrainJob,
        engine: EngineLifecycle,
        pool: Pool,
        trainer: Trainer,
        runlog: RunLog,
        saves: Checkpointer,
        vocabulary: Callable[[], Vocabulary] = Vocabulary,
    ) -> None:
        """`vocabulary` names why sessions branch; it may take its time and is asked in a thread."""
        self._job = job
        self._engine = engine
        self._pool = pool
        self._trainer = trainer
        self._log = runlog
        self._saves = saves
        self._vocabulary = vocabulary
        self._limit = MismatchStop()
        self._count_earlier(job.max_mismatch_k3)
        self._told_drops = Counter(runlog.drops)
        self._planned: deque[PlannedBatch] = deque()
        """In the journal, and not trained yet as the weights stand."""
        self._num_failed = 0
        self._retry_at = 0.0
        self._recorded_at: float | None = None
        self.is_whole = False
        """Whether the trainer's weights are those of the steps in the log."""

    def _count_earlier(self, limit: float | None) -> None:
        """Count the steps of earlier processes, which may have ended right at the limit before they
        recorded the stop."""
        for made in self._log.steps_since_stop():
            self._limit.saw(made.step, made.metrics, limit)
        if self.stopped is not None:
            self._log.record_stop(self._log.last_step, self.stopped)

    @property
    def stopped(self) -> str | None:
        """Why no more steps will be taken; None while they will."""
        return self._limit.reason

    @property
    def has_planned(self) -> bool:
        """Whether the next step's groups are chosen: nobody need be waited for."""
        return bool(self._planned)

    def is_due(self, now: float) -> bool:
        has_groups = self.has_planned or self._pool.is_due
        return self.is_whole and now >= self._retry_at and has_groups

    def resume(self, batches: Sequence[PlannedBatch]) -> None:
        """The trainer has been restored; these come before any other."""
        self._planned = deque(self._fresh(batch) for batch in batches)
        self.is_whole = True

    def _fresh(self, batch: PlannedBatch) -> PlannedBatch:
        """As it was taken from the pool: without calls that were too old by then."""
        bound = self._job.max_staleness
        groups = [keep_fresh(group, batch.version, bound)[0] for group in batch.groups]
        return replace(batch, groups=groups)

    async def make(self) -> int | None:
        """The version of the new weights, which are not published yet; None where no step came
        about. Raises what the trainer raises when it is lost: its batch stays planned."""
        batch = await self._next_batch()
        if batch is None:
            return None
        try:
            version = await self._train(batch)
        except StepFailed as failure:
            fields = {"step": batch.step}
            log.error("step %d failed, the engine goes on: %s", batch.step, failure, extra=fields)
            self._retry_at = time.monotonic() + RETRY_STEP_AFTER_S
            self._num_failed += 1
            if self._num_failed < MAX_FAILURES:
                return None
            # Its groups seem to be what makes it fail.
            await self._log.record_untrainable_batch(batch, "step_failed")
            version = None
        self._planned.popleft()
        self._num_failed = 0
        return version

    async def _next_batch(self) -> PlannedBatch | None:
        """In the journal before it is trained: whatever dies then, the next try trains the same."""
        if not self._planned:
            step, version = self._engine.global_step, self._engine.version
            taken = self._pool.take(version)
            self._log.record_drops(step, taken.dropped)
            if not taken.groups:
                return None
            self._planned.append(PlannedBatch(step, version, taken.groups))
            await self._log.record_plan(self._planned[0])
        return self._planned[0]

    async def _train(self, batch: PlannedBatch) -> int:
        """The log knows the version before any call can carry it."""
        groups = batch.groups
        plan = self._plan(batch, await self._penalties(groups))
        covered = _covered(plan, groups)
        beside = asyncio.create_task(asyncio.to_thread(self._branches, groups))
        self.is_whole = False
        try:
            metrics = await self._update(plan)
            metrics = covered | await beside | metrics
        finally:
            beside.cancel()
        crash_point("train.updated")
        version = max(self._engine.next_version(), self._log.version + 1)
        await self._record(plan, metrics, version)
        self.is_whole = True
        return version

    def _branches(self, groups: Sequence[FinishedGroup]) -> StepMetrics:
        # Isolated: the names of causes are not worth a step.
        try:
            return branches(groups, self._vocabulary())
        except Exception:
            log.exception("why sessions branched could not be told")
            return {}

    async def _penalties(self, groups: Sequence[FinishedGroup]) -> list[list[float]] | None:
        try:
            return await reward_penalties(self._trainer, groups, self._job)
        except ActionFailed as failure:
            raise StepFailed(str(failure)) from failure

    def _plan(self, batch: PlannedBatch, penalties: list[list[float]] | None) -> PlannedStep:
        # Translated: rewards no arithmetic can take are these groups' trouble, not the engine's.
        try:
            plan = plan_step(batch.step, batch.groups, self._job, penalties)
        except Exception as failure:
            raise StepFailed(f"its groups cannot be compared: {failure!r}") from failure
        # Served under this version were the trainer's weights as they stand: nothing has been
        # trained since, or all of it has been undone.
        return replace(plan, batch=replace(plan.batch, version=batch.version))

    async def _update(self, plan: PlannedStep) -> StepMetrics:
        try:
            return await self._trainer.step(plan.batch, LossSpec.of(self._job))
        # Nothing was trained then: a step that fails half way is a plain BackendError.
        except ActionFailed as failure:
            self.is_whole = True
            raise StepFailed(str(failure)) from failure

    async def _record(self, plan: PlannedStep, measured: StepMetrics, version: int) -> None:
        step = plan.batch.step
        metrics = with_left_out(plan.metrics, self._pool.take_left_out()) | measured
        metrics |= self._lap() | self._new_drops()
        trained = plan.trained
        if metrics.get("no_update"):
            metrics = without_update(metrics, "too_far" if metrics.get("too_far") else "not_finite")
            metrics |= {"feedback_tokens": 0.0} if "feedback_tokens" in metrics else {}
            trained = [one.model_copy(update={"siblings": [], "advantages": []}) for one in trained]
        self._limit.saw(step, metrics, self._job.max_mismatch_k3)
        is_last = self.stopped is not None or step == self._job.total_training_steps
        saved = await self._saves.save_if_due(step, version, metrics, is_last=is_last)
        await self._log.record_step(step, version, trained, metrics, saved)
        if saved is not None:
            await self._saves.kept(saved)
        fields = {"step": step, "version": version, "metrics": jsonable_numbers(metrics)}
        log.info("%s", step_line(step, version, metrics), extra=fields)
        self._watch(step, metrics)

    def _new_drops(self) -> StepMetrics:
        """Groups that were dropped since the step before, for whatever reason."""
        drops = Counter(self._log.drops)
        new, self._told_drops = drops - self._told_drops, drops
        return {f"{DROPPED}{reason}": float(num) for reason, num in new.items()}

    def _lap(self) -> StepMetrics:
        """Since the step before: what was sampled and waited for is in it."""
        before, self._recorded_at = self._recorded_at, time.monotonic()
        return {} if before is None else {"step_seconds": self._recorded_at - before}

    def _watch(self, step: int, metrics: Mapping[str, float]) -> None:
        limit, field = self._job.max_mismatch_k3, {"step": step}
        if metrics.get("too_far"):
            told = (step, shown(metrics, "mismatch_k3", ".3g"), limit)
            said = "step %d made no update: mismatch_k3 %s is above max_mismatch_k3 %s"
            log.error(said, *told, extra=field)
        elif metrics.get("skipped"):
            made = "no update" if metrics.get("no_update") else "not all of its updates"
            why = not_finite(metrics) or "not finite"
            log.error("step %d made %s: %s", step, made, why, extra=field)
        if self.stopped is not None:
            log.error("%s", self.stopped, extra=field)
            self._log.record_stop(step, self.stopped)


def _covered(plan: PlannedStep, groups: Sequence[FinishedGroup]) -> StepMetrics:
    """What is trained of the groups' tokens, and beside them of feedback samples'."""
    covered = coverage(groups, plan.batch.calls)
    if "feedback_samples" not in plan.metrics:
        return covered
    of_samples = plan.metrics["tokens_trained"] - covered["tokens_trained"]
    return covered | {"feedback_tokens": of_samples}
