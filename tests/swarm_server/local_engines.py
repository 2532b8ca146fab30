"""A rollout and a trainer as two engines in this process. Each is the shipped fake engine with
deaths and failures that a test plans."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.fake.engine import FakeEngine
from fakevllm_server.types.backend import (
    ActionFailed,
    BackendError,
    Batch,
    Call,
    Endpoint,
    LossSpec,
    PolicyName,
    StepMetrics,
)
from fakevllm_server.types.known_prompt import ProbeReply

SLOW_CHECK_S = 0.01
STALE = 100.0
"""Value of theta that no step of the tests reaches."""


class LocalEngine:
    """An engine that can be launched, die, and fail its next actions as planned."""

    def __init__(self) -> None:
        self.engine: FakeEngine | None = None
        self.num_launched = 0
        self.failures: dict[str, deque[Exception]] = {}
        self.num_slow_checks = 0
        """Number of health checks that fail slowly."""
        self.may_launch = asyncio.Event()
        self.may_launch.set()
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def plan(self, action: str, *failures: Exception) -> None:
        """Let the next calls of `action` raise these exceptions, one each."""
        self.failures[action] = deque(failures)

    def die(self, cause: str) -> None:
        """End the engine; `lost` returns `cause`."""
        self.engine = None
        self._dead.set_result(cause)

    async def health(self) -> bool:
        if self.num_slow_checks and self.engine is not None:
            self.num_slow_checks -= 1
            await asyncio.sleep(SLOW_CHECK_S)
            return False
        return self.engine is not None

    async def lost(self) -> str:
        if self.engine is None and not self._dead.done():
            return "it is not running"
        return await asyncio.shield(self._dead)

    async def close(self) -> None:
        self.engine = None

    async def _launch(self) -> FakeEngine:
        await self.may_launch.wait()
        self._engine_for("launch", must_run=False)
        self.num_launched += 1
        self._dead = asyncio.get_running_loop().create_future()
        self.engine = FakeEngine()
        return self.engine

    def _engine_for(self, action: str, *, must_run: bool = True) -> FakeEngine:
        if self.failures.get(action):
            raise self.failures[action].popleft()
        if must_run and self.engine is None:
            raise BackendError("it is not running")
        return self.engine or FakeEngine()


class LocalRollout(LocalEngine):
    """A rollout that records the versions of the weights it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[int] = []
        self.refusal: str | None = None
        """Refusal in the endpoint of later launches."""

    async def launch(self) -> Endpoint:
        engine = await self._launch()
        name, length = engine.model_name, engine.max_model_len
        # True as in the embedded engine, which does not know the trainer.
        return Endpoint(
            None, "http://engine", name, length, refusal=self.refusal, reports_allowed=True
        )

    async def load_weights(self, folder: Path, version: int) -> None:
        await self._engine_for("load_weights").load_weights(folder, version)
        self.loaded.append(version)

    async def load_policy(self, name: str, folder: Path, version: int) -> None:
        try:
            await self._engine_for("load_policy").load_policy(name, folder, version)
        except ValueError as error:
            raise ActionFailed(str(error)) from None

    async def unload_policy(self, name: str) -> None:
        await self._engine_for("unload_policy").unload_policy(name)

    async def probe(self) -> ProbeReply | None:
        return await self._engine_for("probe").probe()

    async def policies(self) -> dict[str, int]:
        return dict(self._engine_for("policies").names.loaded)


class StaleRollout(LocalRollout):
    """A rollout that keeps old weights in some of its loads, and reports the new version."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stale: deque[bool] = deque()
        """Whether each of the next loads keeps old weights."""
        self.keeps_all_stale = False
        self.answers = True

    async def load_weights(self, folder: Path, version: int) -> None:
        await super().load_weights(folder, version)
        if self.keeps_all_stale or (self.is_stale and self.is_stale.popleft()):
            assert self.engine is not None
            self.engine._sampler_theta = STALE  # pyright: ignore[reportPrivateUsage]

    async def probe(self) -> ProbeReply | None:
        return await super().probe() if self.answers else None


class LocalTrainer(LocalEngine):
    """A trainer that records its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.step_begun = asyncio.Event()
        self.may_step = asyncio.Event()
        self.may_step.set()

    async def launch(self) -> object:
        return await self._launch()

    async def boot(self, job: TrainJob) -> None:
        await self._engine_for("boot").boot(job)

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        self.step_begun.set()
        await self.may_step.wait()
        metrics = await self._engine_for("step").step(batch, loss)
        self.steps.append(batch.step)
        return metrics

    async def log_probs(self, calls: Sequence[Call], policy: PolicyName) -> list[list[float]]:
        return await self._engine_for("log_probs").log_probs(calls, policy)

    async def export(self, folder: Path) -> None:
        await self._engine_for("export").export(folder)

    async def export_adapters(self, folder: Path, policy: PolicyName) -> None:
        await self._engine_for("export_adapters").export_adapters(folder, policy)

    async def save(self, folder: Path) -> None:
        await self._engine_for("save").save(folder)

    async def restore(self, folder: Path) -> None:
        await self._engine_for("restore").restore(folder)


class SleepingRollout(LocalRollout):
    """A rollout that frees its memory during each step. It records what happened, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asleep = False
        self.events: list[str] = []

    async def sleep(self) -> None:
        self._engine_for("sleep")
        self.is_asleep = True
        self.events.append("sleep")

    async def wake_up(self) -> None:
        if self.is_asleep:
            self.is_asleep = False
            self.events.append("wake_up")

    async def load_weights(self, folder: Path, version: int) -> None:
        await super().load_weights(folder, version)
        self.is_asleep = False
        self.events.append(f"load {version}")
