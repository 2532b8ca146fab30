"""The loop of one run: boot, roll, stop, train, publish, save; and boot again when an engine dies.

Rolling goes on through all of it for passive traffic. What is trained is decided here and nowhere
else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.episodes.states import EngineLifecycle
from fakevllm_server.forest.history import Vocabulary
from fakevllm_server.run.log import RunLog
from fakevllm_server.training.checkpointing import Checkpointer
from fakevllm_server.training.guards import RestartBackoff, finished
from fakevllm_server.training.intake import Intake
from fakevllm_server.training.publisher import Publisher
from fakevllm_server.training.step import StepRunner
from fakevllm_server.types.backend import Backend, BackendError, BackendRefused, Endpoint

log = logging.getLogger("fakevllm.server")

SWEEP_EVERY_S = 1.0
STEP_GRACE_S = 30.0
"""How long a stop waits for the step in hand."""
SAVE_GRACE_S = 60.0
"""How long a stop waits for the last checkpoint."""


class EngineLost(Exception):
    """An engine died under a running loop."""


class TrainLoop:
    """Drives engine, pool and backend for one job."""

    def __init__(
        self,
        job: TrainJob,
        engine: EngineLifecycle,
        intake: Intake,
        backend: Backend,
        runlog: RunLog,
        saves: Checkpointer,
        on_endpoint: Callable[[Endpoint], Awaitable[None]],
        vocabulary: Callable[[], Vocabulary] = Vocabulary,
    ) -> None:
        self._job = job
        self._engine = engine
        self._intake = intake
        self._pool = intake.pool
        self._episodes = intake.episodes
        self._backend = backend
        self._log = runlog
        self._saves = saves
        self._steps = StepRunner(
            job, engine, self._pool, backend.trainer, runlog, saves, vocabulary
        )
        self._weights = Publisher(job, engine, backend, runlog, saves, self._steps)
        self._on_endpoint = on_endpoint
        self._changed = asyncio.Event()
        self._back_off = RestartBackoff()
        self._is_stopping = False
        self._sweep_at = 0.0
        self._connected: Endpoint | None = None
        self._lost: asyncio.Future[str] | None = None

    @property
    def closed(self) -> str | None:
        """Why no more steps will be taken, as groups are told; None while they are."""
        return self._over if self._weights.refusal is None else "training_refused"

    @property
    def has_planned(self) -> bool:
        """Whether a step is being made, or is to be tried again."""
        return self._steps.has_planned

    def notify(self) -> None:
        """The pool or the episodes changed."""
        self._changed.set()

    async def run(self) -> None:
        """Until stopped. An engine that fails is started again, later and later while it keeps
        failing."""
        while not self._is_stopping:
            try:
                await self._boot()
                await self._roll_until_lost()
            except BackendRefused as failure:
                return await self._give_up(failure)
            # Isolated: whatever it was, a new engine on the last checkpoint is a state we know.
            except Exception as failure:
                await self._recover(failure)

    async def stop(self, running: asyncio.Task[None]) -> None:
        """Ends `run`, after the step in hand; saves what was trained since the last checkpoint, and
        closes the engine. Never raises."""
        self._is_stopping = True
        self.notify()
        if self._engine.status is EngineStatus.WEIGHT_SYNCING:
            await asyncio.wait({running}, timeout=STEP_GRACE_S)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        # Isolated: a stop must come to its end.
        try:
            async with asyncio.timeout(SAVE_GRACE_S):
                await self._save_last()
        except Exception as failure:
            log.error("the last steps could not be saved: %r", failure)
        if self._log.last_step > self._saves.last_step:
            unsaved = self._saves.last_step + 1, self._log.last_step
            log.warning(
                "not saved, and to be trained again at the next start: steps %d to %d", *unsaved
            )
        await self._close()

    @property
    def _over(self) -> str | None:
        """Why no more steps will be taken though the trainer would; None while they are."""
        if self._steps.stopped is not None:
            return "training_stopped"
        return finished(self._job, self._engine.global_step - 1)

    async def _save_last(self) -> None:
        step = self._log.last_step
        if self._steps.is_whole and step > self._saves.last_step:
            saved = await self._saves.save(step, self._engine.version)
            await self._log.record_checkpoint(saved)
            await self._saves.kept(saved)

    async def _give_up(self, refused: BackendRefused) -> None:
        """Trying again would end the same way: the user must mend something."""
        log.error("%s; the engine stays offline", refused)
        self._move(EngineStatus.OFFLINE, str(refused))
        await self._close()

    async def _close(self) -> None:
        # Isolated: a stop must come to its end.
        try:
            await self._backend.close()
        except Exception:
            log.exception("the engine could not be closed")

    async def _recover(self, failure: Exception) -> None:
        is_known = isinstance(failure, EngineLost | BackendError)
        # The detail reaches apps, so an error we do not know gives its name only.
        detail = str(failure) if is_known else f"{type(failure).__name__}; see the server's log"
        back_off_s = self._back_off.failed(time.monotonic())
        trace = None if is_known else failure
        log.error("%s; starting it again in %.0f s", detail, back_off_s, exc_info=trace)
        # Isolated: whatever cannot be closed, the next start finds it dead or alive.
        try:
            await self._give_up_doubtful(is_known)
        except Exception:
            log.exception("the engine could not be closed")
        await self._tell_trouble(detail)
        if not self._is_stopping:
            await asyncio.sleep(back_off_s)

    async def _give_up_doubtful(self, is_known: bool) -> None:
        """What may not be in the state we take it for is ended; the next boot starts it anew."""
        if not is_known:
            await self._backend.close()
        elif not self._steps.is_whole:
            await self._backend.trainer.close()

    async def _tell_trouble(self, detail: str) -> None:
        is_serving = self._engine.is_serving and await self._backend.is_sampling()
        to = EngineStatus.WEIGHT_SYNCING if is_serving else EngineStatus.BOOTING
        if self._engine.status is not to:
            self._move(to, detail)
        self._engine.detail = detail

    async def _boot(self) -> None:
        if self._engine.is_serving and not await self._backend.is_sampling():
            # Before a new one answers in its place, with weights that are not the last ones.
            self._move(EngineStatus.BOOTING, self._engine.detail)
        log.info("starting the engine; a large one takes minutes")
        started = await self._backend.start()
        await self._weights.bring(started)
        self._close_if_over()
        if started.endpoint is not self._connected:
            await self._on_endpoint(started.endpoint)
            self._connected = started.endpoint
        self._back_off.booted(time.monotonic())
        untrained = started.endpoint.refusal or self._weights.detail
        self._move(EngineStatus.ROLLING, untrained or self._steps.stopped)
        name = started.endpoint.model_name
        log.info("ready: %s, weights of version %d", name, self._engine.version)
        self._tell_if_finished()

    async def _roll(self) -> None:
        while True:
            await self._until(self._can_step)
            if self._is_stopping:
                return
            self._move(EngineStatus.ROLLING_POST)
            await self._until(
                lambda: (
                    self._steps.has_planned
                    or self._engine.post_is_over(time.monotonic(), self._episodes.num_training)
                )
            )
            if self._is_stopping:
                return
            if not self._steps.has_planned:
                self._intake.complete_all()
            self._move(EngineStatus.WEIGHT_SYNCING)
            await self._train_step()
            self._move(EngineStatus.ROLLING, self._steps.stopped)

    def _can_step(self) -> bool:
        return self.closed is None and self._steps.is_due(time.monotonic())

    async def _train_step(self) -> None:
        version = await self._steps.make()
        if version is None:
            return
        await self._weights.publish(version)
        self._back_off.proved()
        self._engine.global_step = self._log.last_step + 1
        self._close_if_over()
        self._tell_if_finished()

    def _tell_if_finished(self) -> None:
        if finished(self._job, self._log.last_step) is not None:
            log.info(
                "step %d was the last (total_training_steps %d): calls are served, and nothing is "
                "trained any more",
                self._log.last_step,
                self._job.total_training_steps,
            )

    def _close_if_over(self) -> None:
        """What waits goes; where the trainer refuses it stays, for it may be mended."""
        if self._over is not None:
            self._log.record_drops(self._log.last_step, self._pool.give_up(self._over))

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Until it holds or the loop is stopped. It looks at each change, and once a second, when
        idle episodes and open groups go. Raises EngineLost."""
        while True:
            if (now := time.monotonic()) >= self._sweep_at:
                self._sweep_at = now + SWEEP_EVERY_S
                self._intake.sweep(now)
                self._pool.sweep(now)
            self._log.record_drops(self._engine.global_step, self._pool.take_dropped())
            self._close_if_over()
            if self._is_stopping or condition():
                return
            self._changed.clear()
            if self._lost is not None and self._lost.done():
                raise EngineLost(self._lost.result())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_EVERY_S):  # wait_for may lose a cancellation
                    await self._changed.wait()

    async def _roll_until_lost(self) -> None:
        """A step in hand is not cut off by the loss of another engine than the trainer."""
        self._lost = asyncio.ensure_future(self._backend.lost())
        self._lost.add_done_callback(lambda _: self.notify())
        try:
            await self._roll()
        finally:
            lost, self._lost = self._lost, None
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)

    def _move(self, to: EngineStatus, detail: str | None = None) -> None:
        self._engine.move(to, time.monotonic(), detail)
