"""A rollout and a trainer apart, in this process: the shipped fake engine twice, each with deaths
and troubles that a test plans."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.fake.engine import FakeEngine
from fakevllm_server.types.backend import (
    BackendError,
    Batch,
    Call,
    Endpoint,
    LossSpec,
    PolicyName,
    StepMetrics,
)

SLOW_LOOK_S = 0.01


class Part:
    """What both have: a life that may end."""

    def __init__(self) -> None:
        self.engine: FakeEngine | None = None
        self.num_launched = 0
        self.troubles: dict[str, deque[Exception]] = {}
        self.slow_looks = 0
        """So many answers about its health come too late."""
        self.may_launch = asyncio.Event()
        self.may_launch.set()
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def plan(self, action: str, *troubles: Exception) -> None:
        self.troubles[action] = deque(troubles)

    def die(self, told: str) -> None:
        self.engine = None
        self._dead.set_result(told)

    async def health(self) -> bool:
        if self.slow_looks and self.engine is not None:
            self.slow_looks -= 1
            await asyncio.sleep(SLOW_LOOK_S)
            return False
        return self.engine is not None

    async def lost(self) -> str:
        if self.engine is None and not self._dead.done():
            return "it is not running"
        return await asyncio.shield(self._dead)

    async def close(self) -> None:
        self.engine = None

    async def _live(self) -> FakeEngine:
        await self.may_launch.wait()
        self._alive("launch", must_run=False)
        self.num_launched += 1
        self._dead = asyncio.get_running_loop().create_future()
        self.engine = FakeEngine()
        return self.engine

    def _alive(self, action: str, *, must_run: bool = True) -> FakeEngine:
        if self.troubles.get(action):
            raise self.troubles[action].popleft()
        if must_run and self.engine is None:
            raise BackendError("it is not running")
        return self.engine or FakeEngine()


class LocalRollout(Part):
    """Remembers what it was given to sample with."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[int] = []
        self.refusal: str | None = None
        """Of those launched from now on."""

    async def launch(self) -> Endpoint:
        engine = await self._live()
        name, length = engine.model_name, engine.max_model_len
        # As an embedded engine says it, whatever trains beside it.
        return Endpoint(
            None, "http://engine", name, length, refusal=self.refusal, reports_allowed=True
        )

    async def load_weights(self, folder: Path, version: int) -> None:
        await self._alive("load_weights").load_weights(folder, version)
        self.loaded.append(version)


class LocalTrainer(Part):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.step_begun = asyncio.Event()
        self.may_step = asyncio.Event()
        self.may_step.set()

    async def launch(self) -> object:
        return await self._live()

    async def boot(self, job: TrainJob) -> None:
        await self._alive("boot").boot(job)

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        self.step_begun.set()
        await self.may_step.wait()
        metrics = await self._alive("step").step(batch, loss)
        self.steps.append(batch.step)
        return metrics

    async def log_probs(self, calls: Sequence[Call], policy: PolicyName) -> list[list[float]]:
        return await self._alive("log_probs").log_probs(calls, policy)

    async def export(self, folder: Path) -> None:
        await self._alive("export").export(folder)

    async def save(self, folder: Path) -> None:
        await self._alive("save").save(folder)

    async def restore(self, folder: Path) -> None:
        await self._alive("restore").restore(folder)
