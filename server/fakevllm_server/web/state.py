"""One server's whole state, and the start and stop of its engine. The routes speak to this and to
nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from functools import cache

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.errors import WireError, unavailable
from fakevllm_adapters.protocol.keys import new_id
from fakevllm_adapters.protocol.reasons import OutageReason
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.backends.process.table import open_backend
from fakevllm_server.backends.vllm.command import job_arguments
from fakevllm_server.config.model import ConfigError, ServerConfig, find_model
from fakevllm_server.episodes.group_policy import batches_waiting
from fakevllm_server.episodes.participation import Participation
from fakevllm_server.episodes.pool import Pool
from fakevllm_server.episodes.registry import EpisodeRegistry
from fakevllm_server.episodes.states import EngineLifecycle
from fakevllm_server.journal import changes, reads
from fakevllm_server.journal.store import Journal
from fakevllm_server.journal.writer import JournalError
from fakevllm_server.rollout.engine_client import EngineClient
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.run.folder import RunFolder, fingerprint
from fakevllm_server.run.log import RunLog
from fakevllm_server.run.metadata import engine_start
from fakevllm_server.training.checkpointing import Checkpointer
from fakevllm_server.training.guards import finish_reason
from fakevllm_server.training.intake import Intake
from fakevllm_server.training.loop import TrainLoop
from fakevllm_server.training.vocabulary import load_vocabulary
from fakevllm_server.types.backend import Endpoint
from fakevllm_server.types.engine_spec import EngineSpec

log = logging.getLogger("fakevllm.server")


LOOK_AGAIN_S = 1.0
"""An engine that failed a call and goes on is only found out by asking it."""


_JOB, _RUNS = "job", "engine_runs"
"""Facts of the run: its latest job; whether an engine has been started and not stopped."""


@dataclass(slots=True)
class ServerState:
    config: ServerConfig
    engine: EngineLifecycle = field(default_factory=EngineLifecycle)
    job: TrainJob | None = None
    server_id: str = field(default_factory=new_id)
    upstream: EngineClient | None = None
    journal: Journal = field(init=False)
    runlog: RunLog = field(init=False)
    intake: Intake = field(init=False)
    run_id: str = field(init=False)
    changing_engine: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held over a whole start or stop: a stop that is still at work would take the socket from
    under an engine started meanwhile."""
    _folder: RunFolder = field(init=False)
    _checkpoints: CheckpointFolders = field(init=False)
    has_logged_stray_calls: bool = False
    """That somebody asks it past the proxy."""
    model: str | None = None
    """The folder; None where there is none, or before the first start."""
    _loop: TrainLoop | None = None
    _running: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._folder = RunFolder(self.config.run_dir)
        with self._refusing():
            if self.config.model is not None:
                self._find_model(self.config.model)
            self._checkpoints = CheckpointFolders(self.config.run_dir / "checkpoints")
            self.journal = Journal(self.config.run_dir / "journal.sqlite")
        self.run_id = self._folder.run_id()
        with self._refusing(), self.journal.opening():
            self._read_journal()

    def _read_journal(self) -> None:
        self.runlog = RunLog(self.journal)
        self.engine.global_step = self.runlog.last_step + 1
        if not (self.runlog.version or self._checkpoints.is_empty):
            # Begun anew, the run would sweep them away.
            raise ValueError("it knows of no training, and there are checkpoints")
        kept = self.journal.read(reads.meta, _JOB)
        self.job = None if kept is None else TrainJob.from_yaml(kept)
        self.intake = Intake(self.journal, self.runlog, self.engine)
        self.intake.resume(self.job, time.monotonic())

    @contextlib.contextmanager
    def _refusing(self) -> Generator[None]:
        """A server that does not start lets go of its directory."""
        try:
            yield
        except ConfigError:
            self._folder.close()
            raise

    @property
    def episodes(self) -> EpisodeRegistry:
        return self.intake.episodes

    @property
    def pool(self) -> Pool:
        return self.intake.pool

    @property
    def participation(self) -> Participation:
        return self.intake.participation

    async def resume(self) -> None:
        """Starts the engine where one ran when an earlier life ended without stopping it."""
        if self.job is None or self.journal.read(reads.meta, _RUNS) is None:
            return
        log.info("going on with the run that was cut off")
        async with self.changing_engine:
            try:
                await self.start_engine()
            except (ConfigError, JournalError) as error:
                log.error("%s The engine stays offline.", error)

    async def start_engine(self) -> None:
        """Begins to boot; for a holder of `changing_engine`. Raises ConfigError where the job's
        model cannot be loaded."""
        assert self.job is not None, "sync a job first"
        rollout, trainer = self._specs(self.job)
        backend = open_backend(rollout, trainer, self.config.weights_dir)
        self.journal.put(changes.meta_set(_JOB, self.job.as_yaml()), changes.meta_set(_RUNS, "yes"))
        await self.journal.flush()
        life = engine_start(self.config, self.job, self.model, fingerprint(self.model))
        await asyncio.to_thread(self._folder.record_engine_start, life)
        self.intake.resume(self.job, time.monotonic())
        self.engine.move(EngineStatus.BOOTING, time.monotonic())
        saves = Checkpointer(backend.trainer, self._checkpoints, self.journal, self.job.save_freq)
        self._loop = TrainLoop(
            self.job,
            self.engine,
            self.intake,
            backend,
            self.runlog,
            saves,
            self.connect,
            cache(lambda: load_vocabulary(self.model)),
        )
        self._running = asyncio.create_task(self._loop.run())
        self._running.add_done_callback(_report)

    async def stop_engine(self) -> None:
        async with self.changing_engine:
            await self._stop_engine()

    async def _stop_engine(self) -> None:
        loop, running = self._loop, self._running
        if loop is not None and running is not None:
            await loop.stop(running)
        self._loop = self._running = None
        before, self.upstream = self.upstream, None
        if before is not None:
            await _leave(before)
        self.intake.reopen_episodes()
        self.participation.is_paused = False
        self.journal.put(changes.meta_set(_RUNS, None))
        if self.engine.status is not EngineStatus.OFFLINE:
            self.engine.move(EngineStatus.OFFLINE, time.monotonic())

    async def close(self) -> None:
        await self.stop_engine()
        await asyncio.to_thread(self.journal.close)
        self._folder.close()

    @property
    def closed(self) -> str | None:
        """Why nothing is trained any more; None while it is."""
        if self._loop is not None:
            return self._loop.closed_reason
        return None if self.job is None else finish_reason(self.job, self.runlog.last_step)

    @property
    def backlog(self) -> float:
        """What waits to be trained, in batches; at least 1 where a step is due, or is to be tried
        again. What is being trained waits no more."""
        if self.job is None or self.closed is not None:
            return 0.0
        is_rolling = self.engine.status is EngineStatus.ROLLING
        is_retried = is_rolling and self._loop is not None and self._loop.has_planned
        return max(batches_waiting(self.pool.counts, self.job), float(is_retried))

    @property
    def detail(self) -> str | None:
        """What is wrong, where anything is."""
        trouble = self.journal.error
        return self.engine.detail or (trouble and f"the journal cannot be written: {trouble}")

    def changed(self) -> None:
        if self._loop is not None:
            self._loop.notify()

    def attached_engine(self) -> EngineClient:
        """The client of an engine that answers, or did and is being started again. Raises
        WireError (503): before the first boot's end and after a stop nobody is kept waiting."""
        if self.upstream is None or self.engine.status is EngineStatus.OFFLINE:
            raise self._not_ready()
        return self.upstream

    def serving_engine(self) -> EngineClient:
        """Raises WireError (503)."""
        upstream = self.attached_engine()
        if not self.engine.is_serving:
            raise self._not_ready()
        return upstream

    async def wait_until_serving(self, failed: EngineClient | None = None) -> EngineClient:
        """The engine's client once calls are answered, however long that takes; `failed` only
        where it is well again. Raises WireError as `attached_engine`."""
        while True:
            upstream = self.attached_engine()
            if self.engine.is_serving and (upstream is not failed or await upstream.is_healthy()):
                if upstream is self.upstream:
                    return upstream
                continue
            look_again_s = LOOK_AGAIN_S if upstream is failed else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(look_again_s):
                    await self.engine.next_move()

    def _not_ready(self) -> WireError:
        detail = f" ({self.engine.detail})" if self.engine.detail else ""
        message = f"The engine is not ready: {self.engine.status}{detail}."
        return unavailable(message, OutageReason.ENGINE_NOT_READY)

    async def connect(self, endpoint: Endpoint) -> None:
        """An engine answers there from now on."""
        client = EngineClient(endpoint)
        await client.fetch_version()
        before, self.upstream = self.upstream, client
        if before is not None:
            await _leave(before, to=endpoint)
        self._folder.record_model(self.config.trainer_name, self.model)

    def _find_model(self, model: str | None) -> str | None:
        """Raises ConfigError where there is none, or the run is another model's."""
        found = find_model(model, self.config.allow_hub) if model is not None else None
        self._folder.check_model(self.config.trainer_name, found)
        return found

    def _specs(self, job: TrainJob) -> tuple[EngineSpec, EngineSpec]:
        """Of the rollout engine and of the trainer. The server's own flags win over the job."""
        config = self.config
        model = config.model_for(job.model)
        if model is None and config.trainer_name != "fake":
            raise ConfigError(
                "No model: start the server with --model DIR, or name one in the job."
            )
        name = config.served_name_of(model)
        self.model = model = self._find_model(model)
        rollout = EngineSpec(
            config.rollout_name,
            config.run_dir,
            model,
            name,
            seed=config.seed,
            allow_hub=config.allow_hub,
            extra_args=config.engine_args_for(job),
            job_args=job_arguments(job) if config.rollout_name == "vllm" else {},
            url=config.rollout_url,
            api_key=config.rollout_key,
        )
        trainer = replace(
            rollout,
            engine=config.trainer_name,
            extra_args=config.trainer_args_for(job),
            train_only=True,
        )
        return rollout, trainer


async def _leave(engine: EngineClient, to: Endpoint | None = None) -> None:
    """After another one, or none, has taken its place: who waits at its gate looks for that."""
    if to is None or to.gate is not engine.endpoint.gate:
        engine.endpoint.gate.abandon()
    await engine.close()


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("the training loop ended", exc_info=task.exception())
