"""The loop of one run: boot, roll, stop, train, publish, save; and boot again when an engine dies.

Rolling goes on through all of it for passive traffic. What is trained is decided here and nowhere
else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from fakevllm_adapters.swarm import EngineStatus, TrainJob
from fakevllm_server.backends.base import (
    Backend,
    BackendError,
    BackendRefused,
    Endpoint,
    LossSpec,
)
from fakevllm_server.batch import PlannedStep, plan_step
from fakevllm_server.calls import FinishedGroup
from fakevllm_server.checkpoints import Checkpoints
from fakevllm_server.engine import Engine
from fakevllm_server.episodes import Episodes
from fakevllm_server.pool import Pool
from fakevllm_server.runlog import RunLog

log = logging.getLogger("fakevllm.server")

SWEEP_EVERY_S = 1.0
MAX_BACK_OFF_S = 30.0
MAX_FAILURES = 3
"""Tries at one step before its groups are dropped."""


class EngineLost(Exception):
    """An engine died under a running loop."""


class TrainLoop:
    """Drives engine, pool and backend for one job."""

    def __init__(
        self,
        job: TrainJob,
        engine: Engine,
        pool: Pool,
        episodes: Episodes,
        backend: Backend,
        runlog: RunLog,
        checkpoints: Checkpoints,
        on_endpoint: Callable[[Endpoint], Awaitable[None]],
    ) -> None:
        self._job = job
        self._engine = engine
        self._pool = pool
        self._episodes = episodes
        self._backend = backend
        self._log = runlog
        self._checkpoints = checkpoints
        self._on_endpoint = on_endpoint
        self._changed = asyncio.Event()
        self._num_failed = 0

    @property
    def is_training(self) -> bool:
        """Whether more steps will be taken."""
        limit = self._job.total_training_steps
        return limit is None or self._engine.global_step <= limit

    def notify(self) -> None:
        """The pool or the episodes changed."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled. An engine that dies is started again, later and later while it keeps
        dying."""
        back_off_s = 1.0
        pool_is_new = True
        while True:
            try:
                await self._boot(pool_is_new)
                back_off_s, pool_is_new = 1.0, False
                await self._or_lost(self._roll())
            except BackendRefused as failure:
                log.error("%s; the engine stays offline", failure)
                await self._backend.rollout.close()
                return self._move(EngineStatus.OFFLINE, str(failure))
            except (EngineLost, BackendError) as failure:
                log.error("%s; starting it again in %.0f s", failure, back_off_s)
                if self._engine.status is not EngineStatus.BOOTING:
                    self._move(EngineStatus.BOOTING, str(failure))
                self._engine.detail = str(failure)
                await asyncio.sleep(back_off_s)
                back_off_s = min(2 * back_off_s, MAX_BACK_OFF_S)

    async def finish(self) -> None:
        """Save what was trained since the last checkpoint, and close the engine."""
        step = self._engine.global_step - 1
        saved = self._checkpoints.latest()
        try:
            if step > 0 and self._engine.is_serving and (saved is None or saved.step < step):
                await self._save(step)
        except BackendError as failure:
            log.error("the last steps could not be saved: %s", failure)
        finally:
            await self._backend.rollout.close()
            await self._backend.trainer.close()

    async def _boot(self, pool_is_new: bool) -> None:
        endpoint = await self._backend.rollout.launch()
        await self._backend.trainer.boot(self._job)
        checkpoint = self._checkpoints.latest()
        if checkpoint is not None:
            await self._backend.trainer.restore(checkpoint.weights)
        step = checkpoint.step if checkpoint is not None else 0
        standing = self._log.standing
        # weights move only by training and publishing: a first start has neither and stays version
        # 0
        self._engine.version = standing.version
        version = self._engine.next_version() if standing.last_step else standing.version
        await self._publish(version)
        lost = standing.trained_after(step) | (standing.pending if pool_is_new else set[str]())
        if lost or standing.last_step:
            self._log.restored(step, version, lost)
            log.warning("restored step %d; %d groups lost", step, len(lost))
        self._pool.refuse(dict.fromkeys(standing.trained, "already_trained") | standing.gone)
        self._engine.global_step = step + 1
        await self._on_endpoint(endpoint)
        self._move(EngineStatus.ROLLING)

    async def _roll(self) -> None:
        while True:
            await self._until(self._can_step)
            self._move(EngineStatus.ROLLING_POST)
            await self._until(
                lambda: self._engine.post_is_over(time.monotonic(), self._episodes.num_training)
            )
            self._move(EngineStatus.WEIGHT_SYNCING)
            await self._train_step()
            self._move(EngineStatus.ROLLING)

    def _can_step(self) -> bool:
        return self.is_training and self._pool.num_finished >= self._job.batch_size

    async def _train_step(self) -> None:
        step = self._engine.global_step
        taken = self._pool.take(self._job.batch_size, self._engine.version, self._job.max_staleness)
        self._log.dropped(step, taken.dropped)
        if len(taken.groups) < self._job.batch_size:
            self._pool.put_back(taken.groups)
            return
        try:
            await self._train(plan_step(step, taken.groups, self._job))
        except (BackendError, asyncio.CancelledError):
            self._give_back(step, taken.groups)
            raise
        self._num_failed = 0
        self._engine.global_step = step + 1
        if step % self._job.save_freq == 0 or not self.is_training:
            await self._save(step)
        if not self.is_training:
            self._log.dropped(step, self._pool.give_up("training_finished"))

    async def _train(self, plan: PlannedStep) -> None:
        """One optimiser step and its publication. The log knows the version before any call can
        carry it."""
        metrics = await self._backend.trainer.step(plan.batch, LossSpec.of(self._job))
        version = self._engine.next_version()
        self._record(plan, metrics, version)
        await self._publish(version)

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

    def _record(self, plan: PlannedStep, metrics: dict[str, float], version: int) -> None:
        step = plan.batch.step
        self._log.trained(step, version, plan.trained, plan.metrics | metrics)
        shown = {key: round(value, 4) for key, value in (plan.metrics | metrics).items()}
        log.info("step %d version %d %s", step, version, shown)

    async def _publish(self, version: int) -> None:
        await self._backend.publish(version)
        self._engine.version = version

    async def _save(self, step: int) -> None:
        consumed = sorted(self._log.standing.trained)
        await self._checkpoints.write(
            step, self._engine.version, consumed, self._backend.trainer.save
        )

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wakes at every change, and once a second to let idle episodes go."""
        while not condition():
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), SWEEP_EVERY_S)
            except TimeoutError:
                self._episodes.sweep(time.monotonic())

    async def _or_lost(self, work: Awaitable[None]) -> None:
        """Runs `work` until an engine dies; its own failure comes first where both happen."""
        task = asyncio.ensure_future(work)
        lost = asyncio.ensure_future(self._backend.lost())
        try:
            await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise EngineLost(lost.result())
            await task
        finally:
            task.cancel()
            lost.cancel()
            await asyncio.gather(task, lost, return_exceptions=True)

    def _move(self, to: EngineStatus, detail: str | None = None) -> None:
        self._engine.move(to, time.monotonic(), detail)
