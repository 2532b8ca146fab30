"""A Backend in this process: the shipped fake engine, with failures that a test plans."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Never, cast

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.fake.engine import FakeEngine
from fakevllm_server.types.backend import (
    BackendStart,
    Batch,
    Call,
    Endpoint,
    LossSpec,
    PolicyName,
    Rollout,
    StepMetrics,
)
from fakevllm_server.types.known_prompt import PROBE_ID


class _NoRollout:
    """Stands for a rollout engine of which a test uses nothing."""

    def __getattr__(self, name: str) -> Never:
        raise AssertionError(f"a test must use LocalRollout for {name}")


class LocalBackend(FakeEngine):
    """A Backend and its Trainer, as an engine that samples and trains in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: dict[str, deque[Exception]] = {}
        """Exceptions that the next calls of an action raise, by the action's name."""
        self.num_launched = 0
        self._endpoint: Endpoint | None = None
        self.steps: list[int] = []
        self.log_prob_policies: list[PolicyName] = []
        """Policy of each request for log-probabilities."""
        self.step_begun = asyncio.Event()
        self.may_step = asyncio.Event()
        self.may_step.set()
        self.may_launch = asyncio.Event()
        self.may_launch.set()
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def served_theta(self) -> float:
        return self._sampler_theta

    @property
    def trainer(self) -> LocalBackend:
        return self

    @property
    def rollout(self) -> Rollout:
        return cast(Rollout, _NoRollout())

    def plan(self, action: str, *failures: Exception) -> None:
        self.failures[action] = deque(failures)

    async def start(self) -> BackendStart:
        await self.may_launch.wait()
        self._fail_if_planned("launch")
        if self._endpoint is not None and not self.dead.done():
            return BackendStart(self._endpoint, trainer_is_new=False)
        self.num_launched += 1
        self.dead = asyncio.get_running_loop().create_future()
        self._endpoint = Endpoint(None, "http://engine", self.model_name, self.max_model_len)
        return BackendStart(self._endpoint, trainer_is_new=True)

    async def launch(self) -> object:
        raise AssertionError("a test must call start instead")

    @asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        yield

    async def is_sampling(self) -> bool:
        return self._endpoint is not None and not self.dead.done()

    async def boot(self, job: TrainJob) -> None:
        self._fail_if_planned("boot")
        await super().boot(job)

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        self.step_begun.set()
        await self.may_step.wait()
        self._fail_if_planned("step")
        self.steps.append(batch.step)
        return await super().step(batch, loss)

    async def log_probs(self, calls: Sequence[Call], policy: PolicyName) -> list[list[float]]:
        if calls[0].group_id != PROBE_ID:
            self._fail_if_planned("log_probs")
            self.log_prob_policies.append(policy)
        return await super().log_probs(calls, policy)

    async def save(self, folder: Path) -> None:
        self._fail_if_planned("save")
        await super().save(folder)

    async def restore(self, folder: Path) -> None:
        self._fail_if_planned("restore")
        await super().restore(folder)

    async def health(self) -> bool:
        return True

    async def close_rollout(self) -> None:
        self._endpoint = None

    async def lost(self) -> str:
        return await asyncio.shield(self.dead)

    async def close(self) -> None:
        self._endpoint = None
        self._fail_if_planned("close")

    def _fail_if_planned(self, action: str) -> None:
        if self.failures.get(action):
            raise self.failures[action].popleft()
