"""A rollout and a trainer as one Backend: in one process, or each in its own."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable
from pathlib import Path

from fakevllm_server.backends.base import Endpoint, Rollout, Started, Trainer
from fakevllm_server.backends.child import ChildEngine

MEMORY = Path("/dev/shm")
"""A folder there is never written to a disk."""


class OneProcess:
    """An engine that samples and trains: publishing never leaves its process."""

    def __init__(self, engine: ChildEngine) -> None:
        self._engine = engine
        self._endpoint: Endpoint | None = None

    @property
    def trainer(self) -> Trainer:
        return self._engine

    async def start(self) -> Started:
        if self._endpoint is not None and await self._engine.health():
            return Started(self._endpoint, trainer_is_new=False)
        self._endpoint = await self._engine.launch()
        return Started(self._endpoint, trainer_is_new=True)

    async def is_sampling(self) -> bool:
        return await self._engine.health()

    async def publish(self, version: int) -> None:
        await self._engine.publish(version)

    async def lost(self) -> str:
        return await self._engine.lost()

    async def close(self) -> None:
        await self._engine.close()


class TwoProcesses:
    """A rollout engine fed with weights by a trainer of another kind. Either may die and be started
    again without the other."""

    def __init__(self, rollout: Rollout, trainer: Trainer, weights_dir: Path | None = None) -> None:
        """Weights pass through a folder in `weights_dir`, in memory where none is given."""
        self._rollout = rollout
        self._trainer = trainer
        self._weights_dir = weights_dir
        self._endpoint: Endpoint | None = None
        self._has_trainer = False
        """Told to the caller, so that one whose start was lost in another's failure is started
        anew."""

    @property
    def trainer(self) -> Trainer:
        return self._trainer

    async def start(self) -> Started:
        rollout_is_new = self._endpoint is None or not await self._rollout.health()
        trainer_is_new = not (self._has_trainer and await self._trainer.health())
        self._has_trainer = not trainer_is_new
        await _both(
            self._launch_rollout() if rollout_is_new else _nothing(),
            self._trainer.launch() if trainer_is_new else _nothing(),
        )
        assert self._endpoint is not None
        self._has_trainer = True
        return Started(self._endpoint, trainer_is_new)

    async def is_sampling(self) -> bool:
        return self._endpoint is not None and await self._rollout.health()

    async def publish(self, version: int) -> None:
        folder = Path(tempfile.mkdtemp(prefix="fakevllm-weights-", dir=self._weights_folder()))
        try:
            await self._trainer.export(folder)
            await self._rollout.load_weights(folder, version)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def lost(self) -> str:
        parts = [asyncio.ensure_future(part.lost()) for part in (self._rollout, self._trainer)]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def close(self) -> None:
        self._endpoint, self._has_trainer = None, False
        await _both(self._rollout.close(), self._trainer.close())

    async def _launch_rollout(self) -> None:
        self._endpoint = None
        self._endpoint = await self._rollout.launch()

    def _weights_folder(self) -> Path | None:
        if self._weights_dir is not None:
            return self._weights_dir
        return MEMORY if MEMORY.is_dir() else None


async def _nothing() -> None:
    pass


async def _both(one: Awaitable[object], other: Awaitable[object]) -> None:
    """At the same time, each to its end. Raises what the first raised, else the second."""
    for outcome in await asyncio.gather(one, other, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
