"""The training loop of one run. The loop starts the engines, collects groups, trains, publishes the
weights, saves checkpoints, and restarts a dead engine.

Model calls of apps are served in all these phases. Only the loop changes the engine's status and
decides when a training step is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.episodes.states import EngineLifecycle
from fakevllm_server.forest.call_text_comparison import Vocabulary
from fakevllm_server.run.log import RunLog
from fakevllm_server.training.checkpointing import Checkpointer
from fakevllm_server.training.publisher import Publisher
from fakevllm_server.training.release_service import (
    Action,
    ReleaseRefused,
    Result,
    ReturnTarget,
)
from fakevllm_server.training.step import StepRunner
from fakevllm_server.training.stop_and_restart import RestartBackoff, finish_reason
from fakevllm_server.training.submission_intake import Intake
from fakevllm_server.types.backend import (
    ActionFailed,
    Backend,
    BackendError,
    BackendRefused,
    Endpoint,
)
from fakevllm_server.types.drop_reasons import DropReason

log = logging.getLogger("fakevllm.server")

SWEEP_EVERY_S = 1.0
"""Seconds between two sweeps. A sweep removes expired claims of episodes and expired open groups.
"""
STEP_GRACE_S = 30.0
"""Maximum number of seconds that a stop waits for the running step."""
SAVE_GRACE_S = 60.0
"""Maximum number of seconds that a stop waits for the last checkpoint."""


class LoopEnded(Exception):
    """Error for an action (a decision about a version) that was not run, because the training loop
    has ended. Actions are run between two training steps."""


class EngineLost(Exception):
    """Error for an engine that died while the loop was running."""


class TrainLoop:
    """The training loop for one job. The loop collects groups (requests with their answers),
    trains, publishes weights, and restarts engines that die."""

    def __init__(
        self,
        job: TrainJob,
        engine: EngineLifecycle,
        intake: Intake,
        backend: Backend,
        runlog: RunLog,
        checkpointer: Checkpointer,
        on_endpoint: Callable[[Endpoint], Awaitable[None]],
        load_vocabulary: Callable[[], Vocabulary] = Vocabulary,
        training_limit: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Create the loop. When a new rollout engine is ready to answer calls, `on_endpoint` is
        awaited with the engine's address. `training_limit` returns the newest version that training
        may make, or None without a limit."""
        self._job = job
        self._engine = engine
        self._intake = intake
        self._pool = intake.pool
        self._episodes = intake.episodes
        self._backend = backend
        self._log = runlog
        self._checkpointer = checkpointer
        self._steps = StepRunner(
            job,
            engine,
            self._pool,
            backend.trainer,
            runlog,
            checkpointer,
            load_vocabulary,
            intake.job_hash,
        )
        self._publisher = Publisher(
            job, engine, backend, runlog, checkpointer, self._steps, intake.distrust
        )
        self._on_endpoint = on_endpoint
        self._training_limit = training_limit
        self._is_limited = False
        """Whether training waits because it has reached the training limit. Each wait is logged
        once."""
        self._changed = asyncio.Event()
        self._backoff = RestartBackoff()
        self._is_stopping = False
        self._sweep_at = 0.0
        self._connected: Endpoint | None = None
        self._lost: asyncio.Future[str] | None = None
        self._actions: deque[tuple[Action[Any], asyncio.Future[Any]]] = deque()
        """Actions that wait for the end of a training step."""
        self.has_ended = False
        """Whether the loop has ended, so that it runs no action any more."""
        self._is_ready = False
        """Whether the engines have started, and none has failed since."""
        self._restart_cause: str | None = None
        """Reason why the trainer has to be started again; None if no new start is needed."""

    @property
    def closed_reason(self) -> str | None:
        """Slug (short name) of the reason why no more steps will be taken. None while training
        continues.

        Clients get this slug in replies.
        """
        return (
            self._end_reason
            if self._publisher.refusal is None
            else DropReason.TRAINING_REFUSED.value
        )

    @property
    def has_planned(self) -> bool:
        """Whether a training step is running, or is waiting to be tried again."""
        return self._steps.has_planned

    @property
    def num_planned_groups(self) -> int:
        """Number of groups that are being trained or wait to be trained again."""
        return self._steps.num_planned_groups

    def notify(self) -> None:
        """Wake the loop, because the pool (the groups that wait to be trained) or the episodes have
        changed."""
        self._changed.set()

    async def between_steps(self, action: Action[Result]) -> Result:
        """Run an action (such as a decision about a version) while no training step runs, and
        return the action's result. The action gets this loop as its argument. If the engines cannot
        be started, the action runs without engines, and gets None instead. Raise LoopEnded if the
        loop ends before the action is run."""
        if self.has_ended:
            raise LoopEnded
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._actions.append((action, done))
        self.notify()
        return await done

    async def run(self) -> None:
        """Run the training loop until the loop is stopped. If an engine fails, restart the engine
        after a pause. The pauses become longer if failures continue."""
        try:
            await self._run()
        finally:
            self._end_actions()

    def _end_actions(self) -> None:
        self.has_ended = True
        for _, done in self._actions:
            if not done.done():
                done.set_exception(LoopEnded())

    async def _run(self) -> None:
        while not self._is_stopping:
            try:
                self._is_ready = False
                await self._boot()
                self._is_ready = True
                await self._roll_until_lost()
            except BackendRefused as failure:
                return await self._give_up(failure)
            # Isolated: whatever failed, a new engine on the last checkpoint is a known state.
            except Exception as failure:
                await self._recover(failure)

    async def stop(self, running: asyncio.Task[None]) -> None:
        """Stop the loop, save the newest steps in a checkpoint, and close the engines. No
        checkpoint is saved if a checkpoint already contains the newest steps.

        `running` is the task that executes `run`. A running step may finish within STEP_GRACE_S
        seconds, and the save may take SAVE_GRACE_S seconds. This method never raises an error.
        """
        self._is_stopping = True
        self.notify()
        if self._engine.status is EngineStatus.WEIGHT_SYNCING or self._engine.async_step_runs:
            await asyncio.wait({running}, timeout=STEP_GRACE_S)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        self._end_actions()  # a task that is cancelled before it begins does not end them
        # Isolated: a stop must complete.
        try:
            async with asyncio.timeout(SAVE_GRACE_S):
                await self._save_last()
        except Exception as failure:
            log.error("the last steps could not be saved: %r", failure)
        if self._log.last_step > self._checkpointer.last_step:
            log.warning(
                "steps %d to %d are not saved; the next start trains them again",
                self._checkpointer.last_step + 1,
                self._log.last_step,
            )
        await self._close()

    @property
    def _end_reason(self) -> str | None:
        """Slug (short name) of the reason why no more steps will be taken. None while training
        continues.

        If the trainer refuses the job, the result is None, because the user may fix the cause. In
        this case, `closed_reason` returns a slug.
        """
        if self._steps.stop_reason is not None:
            return DropReason.TRAINING_STOPPED.value
        return finish_reason(self._job, self._engine.global_step - 1)

    async def _save_last(self) -> None:
        step = self._log.last_step
        if self._steps.is_in_sync and step > self._checkpointer.last_step:
            saved = await self._checkpointer.save(step, self._log.version)
            await self._log.record_checkpoint(saved)
            await self._checkpointer.prune()

    async def _give_up(self, refused: BackendRefused) -> None:
        """Set the engine offline and close the engine. Call this method after an error that the
        user must fix, because another start would fail in the same way."""
        log.error("%s; the engine stays offline", refused)
        self._move(EngineStatus.OFFLINE, str(refused))
        await self._close()

    async def _close(self) -> None:
        # Isolated: a stop must complete.
        try:
            await self._backend.close()
        except Exception:
            log.exception("the engine could not be closed")

    async def _recover(self, failure: Exception) -> None:
        is_known = isinstance(failure, EngineLost | BackendError)
        # The detail reaches apps, so only the name of an unexpected error is shown.
        detail = str(failure) if is_known else f"{type(failure).__name__}; see the server's log"
        pause_s = self._backoff.next_pause(time.monotonic())
        trace = None if is_known else failure
        log.error("%s; starting it again in %.0f s", detail, pause_s, exc_info=trace)
        # Isolated: if the engine cannot be closed, the next start checks whether it is alive.
        try:
            await self._close_uncertain(is_known)
        except Exception:
            log.exception("the engine could not be closed")
        await self._set_failed_status(detail)
        # Isolated: the next start continues from what the journal has.
        try:
            while self._actions and not self._is_ready:
                await self._act_without_engines(*self._actions[0])
        except Exception:
            log.exception("training could not go back completely; the next start continues")
        if not self._is_stopping:
            await asyncio.sleep(pause_s)

    async def _close_uncertain(self, is_known: bool) -> None:
        """Close the engines whose state is unknown after an error. The next start of the engines
        also restarts the closed engines.

        After an unexpected error (`is_known` is false), all engines are closed. After an expected
        error, the rollout engine stays open. The trainer is closed only if its weights may differ
        from the weights that the run log expects.
        """
        if not is_known:
            await self._backend.close()
        elif not self._steps.is_in_sync:
            await self._backend.trainer.close()

    async def _set_failed_status(self, detail: str) -> None:
        is_serving = self._engine.is_serving and await self._backend.is_sampling()
        status = EngineStatus.WEIGHT_SYNCING if is_serving else EngineStatus.BOOTING
        if self._engine.status is not status:
            self._move(status, detail)
        self._engine.detail = detail

    async def _boot(self) -> None:
        if self._engine.is_serving and not await self._backend.is_sampling():
            # Stop serving before a new engine answers with weights that are not the latest.
            self._move(EngineStatus.BOOTING, self._engine.detail)
        log.info("starting the engine; a large one takes minutes")
        started = await self._backend.start()
        await self._publisher.catch_up(started)
        self._drop_groups_if_ended()
        if started.endpoint is not self._connected:
            await self._on_endpoint(started.endpoint)
            self._connected = started.endpoint
        self._backoff.engine_started(time.monotonic())
        untrained = started.endpoint.refusal or self._publisher.refusal_message
        self._move(EngineStatus.ROLLING, untrained or self._steps.stop_reason)
        name = started.endpoint.model_name
        log.info("ready: %s, weights of version %d", name, self._engine.version)
        self._log_if_finished()

    async def _roll(self) -> None:
        while True:
            await self._until(lambda: self._can_act() or self._can_step())
            if self._is_stopping:
                return
            if self._can_act():
                await self._run_action(*self._actions[0])
                continue
            if self._job.async_steps:
                await self._train_beside_episodes()
                continue
            self._move(EngineStatus.ROLLING_POST)
            await self._until(
                lambda: (
                    self._waits_at_limit()
                    or self._steps.has_planned
                    or self._engine.post_is_over(time.monotonic(), self._episodes.num_training)
                )
            )
            if self._is_stopping:
                return
            if self._waits_at_limit():  # the limit was set meanwhile
                self._move_to_rolling()
                continue
            if not self._steps.has_planned:
                self._intake.complete_all_tasks()
            self._move(EngineStatus.WEIGHT_SYNCING)
            await self._train_step()
            self._move_to_rolling()

    async def _run_action(self, action: Action[Any], done: asyncio.Future[Any]) -> None:
        """Run an action (such as a decision about a version), and pass its error to the caller of
        `between_steps`. Also raise an error if an engine failed, or if the action did not complete
        a return to an earlier version. The engines are then restarted."""
        failure = await self._act(action, done, self)
        cause, self._restart_cause = self._restart_cause, None
        is_partial = self._engine.status is EngineStatus.WEIGHT_SYNCING
        is_refused = isinstance(failure, ReleaseRefused)
        is_fatal = isinstance(failure, BackendError | asyncio.CancelledError)
        if failure is not None and (is_fatal or (is_partial and not is_refused)):
            raise failure
        if cause is not None:
            raise EngineLost(cause)
        if self._engine.status is EngineStatus.WEIGHT_SYNCING:
            self._move_to_rolling()

    async def _act_without_engines(self, action: Action[Any], done: asyncio.Future[Any]) -> None:
        """Run an action (such as a decision about a version) while the engines cannot be started.
        If the action makes training go back to an earlier version, close the trainer. The next
        start then restores a checkpoint that still exists after the action."""
        version = self._log.version
        failure = await self._act(action, done, None)
        if self._log.version != version:
            await self._steps_were_discarded()
            self._engine.global_step = self._log.last_step + 1
            await self._backend.trainer.close()
        if isinstance(failure, asyncio.CancelledError):
            raise failure

    async def _act(
        self, action: Action[Any], done: asyncio.Future[Any], control: TrainLoop | None
    ) -> BaseException | None:
        """Run an action (such as a decision about a version), and pass the result or the error to
        the caller of `between_steps`. Return the error. Return None if the action succeeded."""
        failure: BaseException | None = None
        try:
            result = await action(control)
            if not done.done():
                done.set_result(result)
        # Passed on: the caller gets every error.
        except BaseException as error:
            failure = error
        self._actions.popleft()
        self._log.record_drops(self._engine.global_step, self._pool.drop_rejected())
        if failure is not None and not done.done():
            is_cancelled = isinstance(failure, asyncio.CancelledError)
            done.set_exception(LoopEnded() if is_cancelled else failure)
        return failure

    async def save_newest(self) -> None:
        """Save a checkpoint of the newest weights, if these weights have no checkpoint yet. Raise
        ActionFailed if the trainer does not have these weights."""
        if self._log.last_step <= self._checkpointer.last_step:
            return
        if not self._steps.is_in_sync:
            raise ActionFailed(self._publisher.refusal_message or "the trainer is not ready")
        self._move(EngineStatus.WEIGHT_SYNCING)  # a stop of the loop waits for the save
        await self._save_last()

    async def go_back(self, target: ReturnTarget, record: Callable[[], Awaitable[None]]) -> None:
        """Continue training from an earlier version. `record` records the change in the journal
        (the server's SQLite file).

        Normally the trainer restores a checkpoint of this version. In two cases, the trainer is
        instead started again after this method has returned, as after a crash. In the first case,
        the version is the model's original weights, which have no checkpoint. In the second case,
        the trainer is not training, for example because it has refused the job.
        """
        self._move(EngineStatus.WEIGHT_SYNCING)
        if target.folder is not None and self._steps.is_in_sync:
            self._restart_cause = "the trainer could not restore a checkpoint"
            await self._publisher.go_back(target.folder, target.step, record)
            self._restart_cause = None
            log.warning(
                "training went back to step %d (version %d), whose weights are now version %d",
                target.step,
                target.version,
                self._engine.version,
            )
            return
        await record()
        await self._steps_were_discarded()
        self._restart_cause = f"training begins again, with the weights of version {target.version}"
        log.warning("training goes back to step %d (version %d)", target.step, target.version)

    async def _steps_were_discarded(self) -> None:
        self._steps.is_in_sync = False
        await self._checkpointer.steps_were_discarded()
        self._steps.steps_were_discarded()

    def _can_act(self) -> bool:
        """Return True if an action (a decision about a version) is queued and may run now. An
        action is meant for the newest weights. Therefore steps that a crash has undone are trained
        again before an action runs."""
        will_replay = self._steps.is_replaying and self.closed_reason is None
        return bool(self._actions) and not will_replay

    def _can_step(self) -> bool:
        if self.closed_reason is not None or self._waits_at_limit():
            return False
        return self._steps.is_due(time.monotonic())

    def _waits_at_limit(self) -> bool:
        """Return True if the next step would make a version beyond the training limit (the newest
        version that training may make). Steps that a crash has undone are trained again in any
        case. The limit allowed these steps when they were first trained.

        When training begins to wait, this method logs a line.
        """
        limit, version = self._training_limit(), self._log.version
        was_limited = self._is_limited
        self._is_limited = limit is not None and version >= limit and not self._steps.is_replaying
        if self._is_limited and not was_limited:
            log.info(
                "training waits at version %d: a release gate allows no version after %d until "
                "it has decided. Calls are answered meanwhile, and groups are kept. Without a "
                "gate, send {} to POST /training_limit",
                version,
                limit,
            )
        return self._is_limited

    async def _train_beside_episodes(self) -> None:
        """Make a training step while the status stays ROLLING. Clients claim and end episodes
        meanwhile. If the rollout engine dies, or the loop is stopped, the step is completed
        first."""
        self._engine.set_async_step_runs(True)
        step = asyncio.create_task(self._train_step())
        step.add_done_callback(lambda _: self.notify())
        try:
            await self._until(step.done)
            await step
            self._engine.detail = self._rolling_detail
        finally:
            step.cancel()  # has no effect on a step that is done
            await asyncio.gather(step, return_exceptions=True)
            self._engine.set_async_step_runs(False)

    async def _train_step(self) -> None:
        try:
            async with self._backend.training():
                version = await self._steps.run()
                if version is not None:
                    await self._publisher.publish(version)
        finally:
            self._steps.trainer_is_free(time.monotonic())
        if version is None:
            return
        self._backoff.reset()
        self._engine.global_step = self._log.last_step + 1
        self._drop_groups_if_ended()
        self._log_if_finished()

    def _log_if_finished(self) -> None:
        if finish_reason(self._job, self._log.last_step) is not None:
            log.info(
                "step %d was the last (total_training_steps %d): calls are served, and nothing is "
                "trained any more",
                self._log.last_step,
                self._job.total_training_steps,
            )

    def _drop_groups_if_ended(self) -> None:
        """Drop the groups that wait for training if no more steps will be taken.

        If the trainer refuses the job, the groups are kept, because the user may fix the cause.
        """
        if self._end_reason is not None:
            self._log.record_drops(self._log.last_step, self._pool.drop_all(self._end_reason))

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` is true or the loop is stopped. Raise EngineLost if an engine
        dies.

        The condition is checked after each change of the pool (the groups that wait to be trained)
        or the episodes, and at least once a second. Once a second, this method also removes expired
        claims of episodes, and groups whose clients have disappeared.
        """
        while True:
            if (now := time.monotonic()) >= self._sweep_at:
                self._sweep_at = now + SWEEP_EVERY_S
                self._intake.sweep(now)
                self._pool.sweep(now)
            self._log.record_drops(self._engine.global_step, self._pool.take_dropped())
            self._drop_groups_if_ended()
            if self._is_stopping or condition():
                return
            self._changed.clear()
            lost = None if self._engine.async_step_runs else self._lost  # the step ends first
            if lost is not None and lost.done():
                raise EngineLost(lost.result())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_EVERY_S):  # wait_for may lose a cancellation
                    await self._changed.wait()

    async def _roll_until_lost(self) -> None:
        """Collect groups and train until an engine dies. If the rollout engine dies during a
        training step, the step is completed first."""
        self._lost = asyncio.ensure_future(self._backend.lost())
        self._lost.add_done_callback(lambda _: self.notify())
        try:
            await self._roll()
        finally:
            lost, self._lost = self._lost, None
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)

    @property
    def _rolling_detail(self) -> str | None:
        return self._publisher.refusal_message or self._steps.stop_reason

    def _move_to_rolling(self) -> None:
        self._move(EngineStatus.ROLLING, self._rolling_detail)

    def _move(self, status: EngineStatus, detail: str | None = None) -> None:
        self._engine.move(status, time.monotonic(), detail)
