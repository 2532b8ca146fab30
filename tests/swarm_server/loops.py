"""A training loop with all it drives, for tests that break parts of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from swarm_server.samples import call

from fakevllm_adapters.swarm import EngineStatus, SiblingRef
from fakevllm_adapters.train_job import TrainJob
from fakevllm_server import trainer
from fakevllm_server.backends.base import Backend, Endpoint
from fakevllm_server.checkpoints import Checkpoints
from fakevllm_server.engine import Engine
from fakevllm_server.episodes import Episodes
from fakevllm_server.forest.history import Vocabulary
from fakevllm_server.pool import Pool
from fakevllm_server.runlog import RunLog

AnyBackend = TypeVar("AnyBackend", bound=Backend)
JOB = TrainJob(num_repeat=2, batch_size=1, lr=0.1, save_freq=1)


class Run(Generic[AnyBackend]):
    def __init__(
        self,
        folder: Path,
        backend: AnyBackend,
        job: TrainJob = JOB,
        vocabulary: Callable[[], Vocabulary] = Vocabulary,
    ) -> None:
        self.engine = Engine()
        self.endpoints: list[Endpoint] = []
        self.pool = Pool(job)
        self.episodes = Episodes()
        self.backend = backend
        self.log = RunLog(folder / "log")
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.loop = trainer.TrainLoop(
            job,
            self.engine,
            self.pool,
            self.episodes,
            self.backend,
            self.log,
            self.checkpoints,
            self._connect,
            vocabulary,
        )
        self.engine.move(EngineStatus.BOOTING, 0.0)
        self.task = asyncio.create_task(self.loop.run())

    async def finish_group(self, name: str, *rewards: float) -> None:
        await self.rolling()
        self.pool_group(name, *rewards)

    def pool_group(self, name: str, *rewards: float) -> None:
        rewards = rewards or (1.0, 0.0)
        for index in range(len(rewards)):
            self.pool.add_call(SiblingRef(name, index), call(), now=0.0)
        assert self.pool.end_group(name, rewards, step=1).pooled
        self.log.acked(name, step=1)
        self.loop.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                assert not self.task.done(), "the loop ended"
                await asyncio.sleep(0)

    async def rolling(self) -> None:
        await self.until(lambda: self.engine.status is EngineStatus.ROLLING)

    async def trained(self, name: str) -> None:
        await self.until(
            lambda: name in self.log.standing.trained and self.engine.status is EngineStatus.ROLLING
        )

    async def stop(self) -> None:
        await self.loop.stop(self.task)
        self.log.close()

    async def _connect(self, endpoint: Endpoint) -> None:
        self.endpoints.append(endpoint)
