"""One server's whole state, and the start and stop of its engine. The routes speak to this and to
nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from fakevllm_adapters.errors import WireError, unavailable
from fakevllm_adapters.keys import new_id
from fakevllm_adapters.swarm import EngineStatus
from fakevllm_adapters.train_job import TrainJob
from fakevllm_server.backends.base import Endpoint
from fakevllm_server.backends.spec import EngineSpec
from fakevllm_server.backends.table import open_backend
from fakevllm_server.checkpoints import Checkpoints
from fakevllm_server.config import ConfigError, ServerConfig, find_model
from fakevllm_server.engine import Engine
from fakevllm_server.episodes import Episodes
from fakevllm_server.forward import EngineClient
from fakevllm_server.pool import Pool
from fakevllm_server.run_folder import RunFolder
from fakevllm_server.runlog import RunLog
from fakevllm_server.spelling import vocabulary_of
from fakevllm_server.trainer import TrainLoop

log = logging.getLogger("fakevllm.server")


LOOK_AGAIN_S = 1.0
"""An engine that failed a call and goes on is only found out by asking it."""


class WatchedEngine(Engine):
    """An Engine whose moves can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._moved = asyncio.Event()

    def move(self, to: EngineStatus, now: float, detail: str | None = None) -> None:
        super().move(to, now, detail)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def next_move(self) -> None:
        await self._moved.wait()


@dataclass(slots=True)
class Swarm:
    config: ServerConfig
    engine: WatchedEngine = field(default_factory=WatchedEngine)
    episodes: Episodes = field(default_factory=Episodes)
    pool: Pool = field(default_factory=Pool)
    job: TrainJob | None = None
    server_id: str = field(default_factory=new_id)
    upstream: EngineClient | None = None
    runlog: RunLog = field(init=False)
    run_id: str = field(init=False)
    changing_engine: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held over a whole start or stop: a stop that is still at work would take the socket from
    under an engine started meanwhile."""
    _folder: RunFolder = field(init=False)
    _model: str | None = None
    _loop: TrainLoop | None = None
    _running: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._folder = RunFolder(self.config.run_dir)
        self.runlog = RunLog(self.config.run_dir / "runlog.jsonl")
        self.run_id = _run_id(self.config.run_dir / "run_id")
        if self.config.model is not None:
            self._find_model(self.config.model)

    def start_engine(self) -> None:
        """Begins to boot; for a holder of `changing_engine`. Raises ConfigError where the job's
        model cannot be loaded."""
        assert self.job is not None, "sync a job first"
        rollout, trainer = self._specs(self.config.model or self.job.model)
        backend = open_backend(rollout, trainer, self.config.weights_dir)
        self.pool = Pool(self.job)
        self.engine.move(EngineStatus.BOOTING, time.monotonic())
        self._loop = TrainLoop(
            self.job,
            self.engine,
            self.pool,
            self.episodes,
            backend,
            self.runlog,
            Checkpoints(self.config.run_dir / "checkpoints"),
            self.connect,
            cache(lambda: vocabulary_of(self._model)),
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
        self.episodes.clear()
        if self.engine.status is not EngineStatus.OFFLINE:
            self.engine.move(EngineStatus.OFFLINE, time.monotonic())

    async def close(self) -> None:
        await self.stop_engine()
        self.runlog.close()
        self._folder.close()

    @property
    def is_training(self) -> bool:
        return self.closed is None

    @property
    def closed(self) -> str | None:
        """Why nothing is trained any more; None while it is."""
        return "training_finished" if self._loop is None else self._loop.closed

    @property
    def backlog(self) -> float:
        """Finished groups that wait to be trained, in batches."""
        if self.job is None or not self.is_training:
            return 0.0
        return self.pool.num_finished / self.job.batch_size

    def changed(self) -> None:
        if self._loop is not None:
            self._loop.notify()

    def ever_served(self) -> EngineClient:
        """The client of an engine that answers, or did and is being started again. Raises
        WireError (503): before the first boot's end and after a stop nobody is kept waiting."""
        if self.upstream is None or self.engine.status is EngineStatus.OFFLINE:
            raise self._not_ready()
        return self.upstream

    def serving_now(self) -> EngineClient:
        """Raises WireError (503)."""
        upstream = self.ever_served()
        if not self.engine.is_serving:
            raise self._not_ready()
        return upstream

    async def until_serving(self, failed: EngineClient | None = None) -> EngineClient:
        """The engine's client once calls are answered, however long that takes; `failed` only
        where it is well again. Raises WireError as `ever_served`."""
        while True:
            upstream = self.ever_served()
            if self.engine.is_serving and (upstream is not failed or await upstream.is_well()):
                if upstream is self.upstream:
                    return upstream
                continue
            look_again_s = LOOK_AGAIN_S if upstream is failed else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(look_again_s):
                    await self.engine.next_move()

    def _not_ready(self) -> WireError:
        detail = f" ({self.engine.detail})" if self.engine.detail else ""
        return unavailable(f"The engine is not ready: {self.engine.status}{detail}.")

    async def connect(self, endpoint: Endpoint) -> None:
        """An engine answers there from now on."""
        client = EngineClient(endpoint)
        await client.learn_version()
        before, self.upstream = self.upstream, client
        if before is not None:
            await _leave(before, to=endpoint)
        self._folder.remember_model(self.config.trainer_name, self._model)

    def _find_model(self, model: str | None) -> str | None:
        """Raises ConfigError where there is none, or the run is another model's."""
        found = find_model(model, self.config.allow_hub) if model is not None else None
        self._folder.check_model(self.config.trainer_name, found)
        return found

    def _specs(self, model: str | None) -> tuple[EngineSpec, EngineSpec]:
        """Of the rollout engine and of the trainer."""
        config = self.config
        if model is None and config.trainer_name != "fake":
            raise ConfigError(
                "No model: start the server with --model DIR, or name one in the job."
            )
        name = config.served_model_name or (
            Path(model).resolve().name if model else config.rollout_name
        )
        self._model = model = self._find_model(model)
        rollout = EngineSpec(
            config.rollout_name,
            config.run_dir,
            model,
            name,
            seed=config.seed,
            allow_hub=config.allow_hub,
            extra_args=config.engine_args,
            url=config.rollout_url,
            api_key=config.rollout_key,
        )
        trainer = replace(
            rollout, engine=config.trainer_name, extra_args=config.trainer_args, train_only=True
        )
        return rollout, trainer


async def _leave(engine: EngineClient, to: Endpoint | None = None) -> None:
    """After another one, or none, has taken its place: who waits at its gate looks for that."""
    if to is None or to.gate is not engine.endpoint.gate:
        engine.endpoint.gate.abandon()
    await engine.close()


def _run_id(file: Path) -> str:
    if not file.exists():
        file.write_text(new_id())
    return file.read_text()


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("the training loop ended", exc_info=task.exception())
