"""Backends. A backend is a pair of a rollout engine and a trainer, in one or two processes."""

from __future__ import annotations

import asyncio
import hashlib
import platform
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from fakevllm_server.backends.process.child_engine import ChildEngine
from fakevllm_server.backends.process.weight_transports import FOLDER, WEIGHT_TRANSPORTS
from fakevllm_server.types.backend import (
    BackendRefused,
    BackendStart,
    Endpoint,
    Rollout,
    Trainer,
)
from fakevllm_server.types.known_prompt import ProbeReply
from fakevllm_server.types.weight_transfer import Sleeper

MEMORY = Path("/dev/shm")
"""Folder in which files are kept in memory and never written to a disk."""
MAX_SLOW_CHECKS = 6
"""If this many health checks in a row fail slowly, the engine is considered dead."""
COARSEST_DTYPE = "bfloat16"
"""The dtype with the largest rounding errors among those in which a trainer may compute."""
QUICK_CHECK_S = 1.0
"""A health check fails quickly if it fails in less than this number of seconds. Only checks of a
dead engine fail quickly."""


class OneProcess:
    """A backend of one process that samples and trains. New weights stay in this process."""

    def __init__(self, engine: ChildEngine) -> None:
        self._engine = engine
        self._endpoint: Endpoint | None = None

    @property
    def trainer(self) -> Trainer:
        return self._engine

    @property
    def rollout(self) -> Rollout:
        return self._engine

    async def start(self) -> BackendStart:
        if self._endpoint is not None and await self._engine.health():
            return BackendStart(self._endpoint, trainer_is_new=False)
        self._endpoint = await self._engine.launch()
        return BackendStart(self._endpoint, trainer_is_new=True)

    async def is_sampling(self) -> bool:
        return await self._engine.health()

    @asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        yield

    async def publish(self, version: int) -> None:
        await self._engine.publish(version)

    async def probe(self) -> ProbeReply | None:
        return await self._engine.probe()

    async def close_rollout(self) -> None:
        await self._engine.close()

    async def lost(self) -> str:
        return await self._engine.lost()

    async def close(self) -> None:
        await self._engine.close()


class TwoProcesses:
    """A backend of two processes. New weights get from the trainer to the rollout engine by a
    weight transport. If one process dies, only this process is restarted."""

    def __init__(
        self,
        rollout: Rollout,
        trainer: Trainer,
        weights_folder: Path,
        *,
        transport: str = FOLDER,
        sleeps: bool = False,
    ) -> None:
        """Combine a rollout engine and a trainer.

        `transport` is the name of a weight transport. If the transport passes new weights through a
        folder, the folder `weights_folder` is created, and it is removed again afterwards. If
        `sleeps` is true, the rollout engine frees its memory while the trainer trains.
        """
        self._rollout = rollout
        self._trainer = trainer
        self._transport = WEIGHT_TRANSPORTS[transport](rollout, trainer, weights_folder)
        self._sleeper: Sleeper | None = None
        if sleeps:
            assert isinstance(rollout, Sleeper), "the settings allow only rollouts that can sleep"
            self._sleeper = rollout
        self._endpoint: Endpoint | None = None
        self._has_trainer = False
        """Whether the trainer was launched successfully. After a failed launch, the next `start`
        launches the trainer again."""

    @property
    def trainer(self) -> Trainer:
        return self._trainer

    @property
    def rollout(self) -> Rollout:
        return self._rollout

    async def start(self) -> BackendStart:
        rollout_is_new = self._endpoint is None or not await _is_healthy(self._rollout)
        trainer_is_new = not (self._has_trainer and await _is_healthy(self._trainer))
        self._has_trainer = not trainer_is_new
        # One after the other: vLLM measures the free GPU memory at its start. On a shared GPU, it
        # would count the memory of a trainer that loads meanwhile as its own.
        if rollout_is_new:
            self._endpoint = None
            endpoint = await self._rollout.launch()
            # Only a trainer of the same engine renormalizes over the allowed token sets.
            self._endpoint = replace(endpoint, reports_allowed=False)
        assert self._endpoint is not None
        if trainer_is_new:
            try:
                await self._trainer.launch()
            # Isolated: apps are served also without a trainer.
            except BackendRefused as refused:
                return BackendStart(self._endpoint, trainer_is_new, refusal=str(refused))
        self._has_trainer = True
        return BackendStart(self._endpoint, trainer_is_new)

    async def is_sampling(self) -> bool:
        return self._endpoint is not None and await self._rollout.health()

    @asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        if self._sleeper is None:
            yield
            return
        try:
            await self._sleeper.sleep()
            yield
        finally:
            await self._sleeper.wake_up()

    async def publish(self, version: int) -> None:
        takes_adapters = self._endpoint is not None and self._endpoint.takes_adapters
        await self._transport.publish(version, takes_adapters=takes_adapters)

    async def probe(self) -> ProbeReply | None:
        reply = await self._rollout.probe()
        # The trainer is another engine, which may compute in a coarser type.
        return None if reply is None else replace(reply, dtype=COARSEST_DTYPE)

    async def close_rollout(self) -> None:
        self._endpoint = None
        await self._rollout.close()

    async def lost(self) -> str:
        running = [self._rollout, self._trainer] if self._has_trainer else [self._rollout]
        parts = [asyncio.ensure_future(part.lost()) for part in running]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def close(self) -> None:
        self._endpoint, self._has_trainer = None, False
        await _await_both(self._rollout.close(), self._trainer.close())


async def _is_healthy(engine: Rollout | Trainer) -> bool:
    """Return True if a health check of the engine succeeds.

    If a check fails quickly, the engine is dead. If a check fails slowly, the engine may only be
    busy. The check is then repeated up to MAX_SLOW_CHECKS times. The repetition avoids unnecessary
    restarts, which lose the rollout engine's running calls or the trainer's steps since its last
    checkpoint.
    """
    for _ in range(MAX_SLOW_CHECKS):
        start_time = time.monotonic()
        if await engine.health():
            return True
        if time.monotonic() - start_time < QUICK_CHECK_S:
            return False
    return False


def weights_folder(run_dir: Path, root: Path | None) -> Path:
    """Return the path of the folder for new weights. The folder is in `root`. If `root` is None,
    the folder is in memory (/dev/shm). If /dev/shm does not exist, the folder is in the system's
    temporary folder.

    For one run directory on one machine, the path is always the same. Therefore the next server
    process finds and removes the files that a killed server has left.
    """
    run = hashlib.sha256(f"{platform.node()} {run_dir.resolve()}".encode()).hexdigest()[:12]
    if root is None:
        root = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    return root.resolve() / f"fakevllm-weights-{run}"


def kept_weights_folder(folder: Path) -> Path:
    """Return the path of a fleet's copy of its current weights. `folder` is the folder for new
    weights, which is beside the copy."""
    return folder.with_name(f"{folder.name}-kept")


def remove_left_weights(run_dir: Path, root: Path | None) -> None:
    """Remove the weights of one run directory that a killed server has left, in `root` and in
    memory. No engine of this run directory may be running.

    The next server may use other folders than the killed server. If it has one engine that samples
    and trains, it uses none.
    """
    for folder in {weights_folder(run_dir, root), weights_folder(run_dir, None)}:
        for left in folder.parent.glob(f"{folder.name}*"):
            shutil.rmtree(left, ignore_errors=True)


async def _await_both(first: Awaitable[object], second: Awaitable[object]) -> None:
    """Run `first` and `second` at the same time until both have ended. Then raise the exception of
    `first` if it failed. If only `second` failed, raise the exception of `second`."""
    for outcome in await asyncio.gather(first, second, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
