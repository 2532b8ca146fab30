"""Make one training step: take groups from the pool of waiting groups, update the trainer, and
record the step."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.packed_numbers import jsonable_numbers
from fakevllm_adapters.protocol.swarm import TrainedGroup
from fakevllm_server.algorithms.staleness import keep_fresh, staleness_metrics
from fakevllm_server.backends.training.mismatch_limit import NO_UPDATE
from fakevllm_server.episodes.group_pool import Pool
from fakevllm_server.episodes.states import EngineLifecycle
from fakevllm_server.forest.call_text_comparison import Vocabulary
from fakevllm_server.journal.reads import PlannedBatch
from fakevllm_server.run.log import RewardSource, RunLog
from fakevllm_server.run.trained_token_share import coverage, without_update
from fakevllm_server.training.checkpointing import Checkpointer
from fakevllm_server.training.logged_groups import weigh_logged_calls
from fakevllm_server.training.reward_kl import reward_penalties
from fakevllm_server.training.session_branches import branch_metrics
from fakevllm_server.training.step_log import DROPPED, formatted, not_finite, step_line
from fakevllm_server.training.step_plan import PlannedStep, plan_step, with_excluded_counts
from fakevllm_server.training.stop_and_restart import MismatchStop
from fakevllm_server.training.stopped_step import untrained_groups, without_groups
from fakevllm_server.types.backend import ActionFailed, LossSpec, StepMetrics, Trainer
from fakevllm_server.types.calls import FinishedGroup
from fakevllm_server.types.crash_points import crash_point
from fakevllm_server.types.drop_reasons import DropReason
from fakevllm_server.types.number_arrays import FloatArray
from fakevllm_server.types.planted_steps import PLANTED

log = logging.getLogger("fakevllm.server")

MAX_FAILURES = 3
"""Number of failed attempts at a step after which the groups of the step are dropped."""
RETRY_STEP_AFTER_S = 1.0
"""Seconds between two attempts at a step. An engine that crashes exits within this time, so its
death is not counted as a failed step."""


CHANGED = (
    "step %d: %s, so its rewards may be on another scale than those of earlier steps. Curves break "
    "here, and the best checkpoint is chosen among this step and later ones."
)


class StepFailed(Exception):
    """Error for a training step that failed although the engine still runs."""


class StepRunner:
    """Plans, trains and records the steps of one run, one at a time."""

    def __init__(
        self,
        job: TrainJob,
        engine: EngineLifecycle,
        pool: Pool,
        trainer: Trainer,
        runlog: RunLog,
        checkpointer: Checkpointer,
        load_vocabulary: Callable[[], Vocabulary] = Vocabulary,
        job_hash: str = "",
    ) -> None:
        """Create a runner without planned steps. `job_hash` is the digest of the job's identity.

        `load_vocabulary` returns the vocabulary that is needed to find out why calls branch (do not
        continue an earlier call of their session). The function runs in a thread, so it may be
        slow.
        """
        self._job = job
        self._job_hash = job_hash
        self._engine = engine
        self._pool = pool
        self._trainer = trainer
        self._log = runlog
        self._checkpointer = checkpointer
        self._load_vocabulary = load_vocabulary
        self._mismatch_stop = MismatchStop()
        self._count_earlier_steps(job.max_mismatch_k3)
        self._reported_drops = Counter(runlog.drops)
        self._planned: deque[PlannedBatch] = deque()
        """Planned batches in the journal on which the current weights were not trained yet."""
        self._is_replaying = False
        """Whether the planned batches were trained in steps that a crash has undone."""
        self._num_failed = 0
        self._retry_at = 0.0
        self._recorded_at: float | None = None
        self._free_since: float | None = None
        """Time at which the trainer has ended its last step; None while a step runs, and before
        the first step."""
        self._waited_s = 0.0
        """Seconds that the trainer has waited for groups since the last recorded step."""
        self.is_in_sync = False
        """Whether the trainer has the weights that result from the steps in the run log."""

    def _count_earlier_steps(self, limit: float | None) -> None:
        """Pass the steps of earlier server processes to the mismatch stop. The mismatch stop ends
        training if the log-probabilities of trainer and engine differ too much in several
        consecutive steps.

        If the earlier steps reach this limit, record that training stopped. The earlier process may
        have ended before it recorded the stop.
        """
        for entry in self._log.steps_since_stop():
            self._mismatch_stop.observe(entry.step, entry.metrics, limit)
        if self.stop_reason is not None:
            self._log.record_stop(self._log.last_step, self.stop_reason)

    @property
    def stop_reason(self) -> str | None:
        """Reason why training has stopped and no more steps will be taken. None while training
        continues."""
        return self._mismatch_stop.reason

    @property
    def has_planned(self) -> bool:
        """Whether the groups of the next training step are already chosen. If so, the step does not
        wait for running episodes."""
        return bool(self._planned)

    @property
    def num_planned_groups(self) -> int:
        """Number of groups in the planned batches: the groups of the running step, and those of
        steps that a crash has undone."""
        return sum(len(batch.groups) for batch in self._planned)

    @property
    def is_replaying(self) -> bool:
        """True if a crash has undone training steps, and these steps wait to be trained again."""
        return self._is_replaying and self.has_planned

    def is_due(self, now: float) -> bool:
        """Return True if a training step can begin now: the trainer is ready, there are groups for
        a step, and the pause after a failed step is over."""
        has_groups = self.has_planned or self._pool.is_due
        return self.is_in_sync and now >= self._retry_at and has_groups

    def resume(self, batches: Sequence[PlannedBatch]) -> None:
        """Set the batches that must be trained again before a new batch is trained. Call this
        method after the trainer was restored from a checkpoint. `batches` are the batches of the
        steps after the checkpoint."""
        self._planned = deque(self._without_stale_calls(batch) for batch in batches)
        self._is_replaying = bool(batches)
        self.is_in_sync = True

    def steps_were_discarded(self) -> None:
        """Forget the planned batches, and all data about steps that the run log no longer contains.
        Call this method after the journal recorded that training went back to an earlier version of
        the weights."""
        self._planned.clear()
        self._num_failed, self._retry_at = 0, 0.0
        self._mismatch_stop = MismatchStop()
        self._count_earlier_steps(self._job.max_mismatch_k3)

    def _without_stale_calls(self, batch: PlannedBatch) -> PlannedBatch:
        """Return a batch from the journal without its stale calls. A call is stale if the weights
        that sampled it are too old.

        The journal stores the groups with all of their calls. When the batch was first taken from
        the pool of waiting groups, its stale calls were removed only in memory. Therefore they must
        be removed again.
        """
        bound = self._job.max_staleness
        groups = [keep_fresh(group, batch.version, bound)[0] for group in batch.groups]
        return replace(batch, groups=groups)

    async def run(self) -> int | None:
        """Make the next training step. Return the version of the new weights, which are not
        published yet.

        Return None if no step was made. If the trainer dies, the trainer's error is raised, and the
        batch stays planned.
        """
        if self._free_since is not None:
            self._waited_s += time.monotonic() - self._free_since
            self._free_since = None
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
            # The groups of this step seem to make it fail.
            await self._log.record_untrainable_batch(batch, DropReason.STEP_FAILED.value)
            version = None
        self._planned.popleft()
        self._num_failed = 0
        return version

    def trainer_is_free(self, now: float) -> None:
        """Record that a training step has ended, and that its weights are published."""
        self._free_since = now

    async def _next_batch(self) -> PlannedBatch | None:
        """Return the next batch to train, or None if too few groups wait for training.

        A new batch is written to the journal before it is returned. If a process dies during the
        step, the next attempt trains the same batch.
        """
        if not self._planned:
            self._is_replaying = False
            step, version = self._engine.global_step, self._engine.version
            taken = self._pool.take(version)
            self._log.record_drops(step, taken.dropped)
            if not taken.groups:
                return None
            self._planned.append(PlannedBatch(step, version, taken.groups))
            await self._log.record_plan(self._planned[0])
        return self._planned[0]

    async def _train(self, batch: PlannedBatch) -> int:
        """Train a batch, record the step, and return the version of the new weights.

        The version is recorded before the weights are published. Therefore no call can be sampled
        with a version that is not recorded.
        """
        groups = batch.groups
        penalties = await self._penalties(groups)
        plan, coverage_metrics = await asyncio.to_thread(self._plan, batch, penalties)
        branches = asyncio.create_task(asyncio.to_thread(self._branch_metrics, groups))
        try:
            metrics, untrained = await self._update(plan)
            if untrained:
                plan, coverage_metrics = without_groups(plan, coverage_metrics, untrained, groups)
            metrics = coverage_metrics | await branches | metrics
        finally:
            branches.cancel()
        crash_point("train.updated")
        version = max(self._engine.next_version(), self._log.version + 1)
        source = self._log.observe_source([group.hook_hash for group in groups], self._job_hash)
        await self._record(plan, metrics, version, source)
        self.is_in_sync = True
        return version

    def _branch_metrics(self, groups: Sequence[FinishedGroup]) -> StepMetrics:
        # Isolated: the step must not fail because a metric is missing.
        try:
            return branch_metrics(groups, self._load_vocabulary())
        except Exception:
            log.exception("the causes of session branches could not be found")
            return {}

    async def _penalties(self, groups: Sequence[FinishedGroup]) -> list[FloatArray] | None:
        try:
            return await reward_penalties(self._trainer, groups, self._job)
        except ActionFailed as failure:
            raise StepFailed(str(failure)) from failure

    def _plan(
        self, batch: PlannedBatch, penalties: list[FloatArray] | None
    ) -> tuple[PlannedStep, StepMetrics]:
        """Return the batch as a planned step, with the advantage of each call. Also return metrics
        about the share of the batch's tokens that is trained.

        This method runs in a worker thread, because a large step takes seconds.
        """
        # Converted to StepFailed: the cause is in the rewards of these groups, not in the engine.
        try:
            plan = plan_step(
                batch.step,
                batch.groups,
                self._job,
                penalties,
                is_inverted=batch.version in PLANTED,
            )
        except Exception as failure:
            raise StepFailed(f"its groups cannot be compared: {failure!r}") from failure
        # The trainer's current weights were served under this version: no step was trained since,
        # or all later steps were rolled back.
        plan = replace(plan, batch=replace(plan.batch, version=batch.version))
        ages = staleness_metrics(plan.calls, batch.version)
        return plan, ages | _coverage(plan, batch.groups)

    async def _update(self, plan: PlannedStep) -> tuple[StepMetrics, frozenset[str]]:
        """Update the weights. Return the metrics of the update, and the ids of the groups that were
        not trained because the step stopped half way. If the effective sample size of the step's
        logged groups (groups of an earlier run) is too low, make no update."""
        # Converted to StepFailed: no weight has changed, and these groups seem to be the cause.
        try:
            weighed = await weigh_logged_calls(self._trainer, plan.batch, self._job)
        except (ActionFailed, ValueError) as failure:
            raise StepFailed(str(failure)) from failure
        if weighed.is_below(self._job):
            return {**weighed.metrics, **NO_UPDATE, "low_ess": 1.0}, frozenset()
        self.is_in_sync = False
        try:
            metrics = await self._trainer.step(weighed.batch, LossSpec.of(self._job))
            untrained = untrained_groups(weighed.batch, self._job.mini_batch_num, metrics)
            return weighed.metrics | metrics, untrained
        # No weight has changed: a step that fails half way raises a plain BackendError.
        except ActionFailed as failure:
            self.is_in_sync = True
            raise StepFailed(str(failure)) from failure

    async def _record(
        self, plan: PlannedStep, measured: StepMetrics, version: int, source: RewardSource
    ) -> None:
        """Save a checkpoint if one is due, write the step to the run log, and log problems of the
        step."""
        step = plan.batch.step
        metrics = with_excluded_counts(plan.metrics, self._pool.take_excluded_counts()) | measured
        metrics |= self._step_seconds() | self._new_drops()
        trained = plan.trained
        if metrics.get("no_update"):
            metrics = without_update(metrics, _why_no_update(metrics))
            metrics |= {"feedback_tokens": 0.0} if "feedback_tokens" in metrics else {}
            trained = [TrainedGroup(group_id=group.group_id, siblings=[]) for group in trained]
        self._mismatch_stop.observe(step, metrics, self._job.max_mismatch_k3)
        is_last = self.stop_reason is not None or step == self._job.total_training_steps
        if source.changed:
            log.warning(CHANGED, step, source.changed, extra={"step": step})
            self._checkpointer.forget_rewards()
        saved = await self._checkpointer.save_if_due(step, version, metrics, is_last=is_last)
        await self._log.record_step(step, version, trained, metrics, saved, source)
        if saved is not None:
            await self._checkpointer.prune()
        fields = {"step": step, "version": version, "metrics": jsonable_numbers(metrics)}
        log.info("%s", step_line(step, version, metrics), extra=fields)
        self._report_problems(step, metrics)

    def _new_drops(self) -> StepMetrics:
        """Return metrics with the number of groups that were dropped since the previous step, by
        reason."""
        drops = Counter(self._log.drops)
        new, self._reported_drops = drops - self._reported_drops, drops
        return {f"{DROPPED}{reason}": float(num) for reason, num in new.items()}

    def _step_seconds(self) -> StepMetrics:
        """Return the metric `step_seconds`: the seconds since the previous step, including sampling
        and waiting. Also return `trainer_wait_share`: the share of these seconds in which the
        trainer waited for groups. Return {} at the first step of the process."""
        before, self._recorded_at = self._recorded_at, time.monotonic()
        waited_s, self._waited_s = self._waited_s, 0.0
        if before is None:
            return {}
        seconds = self._recorded_at - before
        return {"step_seconds": seconds, "trainer_wait_share": waited_s / max(seconds, 1e-9)}

    def _report_problems(self, step: int, metrics: Mapping[str, float]) -> None:
        fields = {"step": step}
        if metrics.get("too_far"):
            log.error(
                "step %d made no update: mismatch_k3 %s is above max_mismatch_k3 %s",
                step,
                formatted(metrics, "mismatch_k3", ".3g"),
                self._job.max_mismatch_k3,
                extra=fields,
            )
        elif metrics.get("low_ess"):
            log.error(
                "step %d made no update: the effective sample size of its logged groups, %s of "
                "their tokens, is below min_logged_ess %s",
                step,
                formatted(metrics, "logged_ess", ".3g"),
                self._job.min_logged_ess,
                extra=fields,
            )
        elif metrics.get("skipped"):
            updates = "no update" if metrics.get("no_update") else "not all of its updates"
            cause = not_finite(metrics) or "not finite"
            log.error("step %d made %s: %s", step, updates, cause, extra=fields)
        if self.stop_reason is not None:
            log.error("%s", self.stop_reason, extra=fields)
            self._log.record_stop(step, self.stop_reason)


def _why_no_update(metrics: Mapping[str, float]) -> str:
    """Return the reason why a training step did not update the weights, as a part of a metric's
    name."""
    reasons = (reason for reason in ("too_far", "low_ess") if metrics.get(reason))
    return next(reasons, "not_finite")


def _coverage(plan: PlannedStep, groups: Sequence[FinishedGroup]) -> StepMetrics:
    """Return metrics about the share of the groups' sampled tokens that is trained. Further
    returned metrics count the tokens that are not trained, for each reason.

    Feedback samples are answers that are trained again after later feedback. Their trained tokens
    are counted separately, as `feedback_tokens`.
    """
    metrics = coverage(groups, plan.calls)
    if "feedback_samples" not in plan.metrics:
        return metrics
    feedback_tokens = plan.metrics["tokens_trained"] - metrics["tokens_trained"]
    return metrics | {"feedback_tokens": feedback_tokens}
