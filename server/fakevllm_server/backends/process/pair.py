"""A rollout and a trainer as one Backend: in one process, or each in its own."""

from __future__ import annotations

import asyncio
import hashlib
import platform
import shutil
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

from fakevllm_server.backends.process.child import ChildEngine
from fakevllm_server.types.backend import (
    BackendError,
    BackendRefused,
    BackendStart,
    Endpoint,
    Rollout,
    Trainer,
)

MEMORY = Path("/dev/shm")
"""A folder there is never written to a disk."""
MAX_SLOW_LOOKS = 6
AT_ONCE_S = 1.0


class OneProcess:
    """An engine that samples and trains: publishing never leaves its process."""

    def __init__(self, engine: ChildEngine) -> None:
        self._engine = engine
        self._endpoint: Endpoint | None = None

    @property
    def trainer(self) -> Trainer:
        return self._engine

    async def start(self) -> BackendStart:
        if self._endpoint is not None and await self._engine.health():
            return BackendStart(self._endpoint, trainer_is_new=False)
        self._endpoint = await self._engine.launch()
        return BackendStart(self._endpoint, trainer_is_new=True)

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

    def __init__(self, rollout: Rollout, trainer: Trainer, weights_folder: Path) -> None:
        """`weights_folder` is made and removed with each publication."""
        self._rollout = rollout
        self._trainer = trainer
        self._weights_folder = weights_folder
        self._endpoint: Endpoint | None = None
        self._has_trainer = False
        """Told to the caller, so that one whose start was lost in another's failure is started
        anew."""

    @property
    def trainer(self) -> Trainer:
        return self._trainer

    async def start(self) -> BackendStart:
        rollout_is_new = self._endpoint is None or not await _is_well(self._rollout)
        trainer_is_new = not (self._has_trainer and await _is_well(self._trainer))
        self._has_trainer = not trainer_is_new
        # One after the other: vLLM measures the memory it may have, and on a shared GPU a trainer
        # that loads meanwhile would be counted as vLLM's own.
        if rollout_is_new:
            self._endpoint = None
            endpoint = await self._rollout.launch()
            # Only the trainer of the same engine renormalises over what was allowed.
            self._endpoint = replace(endpoint, reports_allowed=False)
        assert self._endpoint is not None
        if trainer_is_new:
            try:
                await self._trainer.launch()
            # Told, not raised: apps are served without it.
            except BackendRefused as refused:
                return BackendStart(self._endpoint, trainer_is_new, refusal=str(refused))
        self._has_trainer = True
        return BackendStart(self._endpoint, trainer_is_new)

    async def is_sampling(self) -> bool:
        return self._endpoint is not None and await self._rollout.health()

    async def publish(self, version: int) -> None:
        try:
            await self._make_folder()
            await self._trainer.export(self._weights_folder)
            await self._rollout.load_weights(self._weights_folder, version)
        finally:
            await self._remove_weights()

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
        await _both(self._rollout.close(), self._trainer.close())

    async def _make_folder(self) -> None:
        await self._remove_weights()
        try:
            self._weights_folder.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise BackendError(
                f"new weights cannot be put into {self._weights_folder} ({error.strerror}): "
                "name another folder with --weights-dir"
            ) from None

    async def _remove_weights(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._weights_folder, ignore_errors=True)


async def _is_well(part: Rollout | Trainer) -> bool:
    """A dead one says so at once. One that only takes its time is asked again: to end it would cost
    its calls, or the steps since the last checkpoint."""
    for _ in range(MAX_SLOW_LOOKS):
        began = time.monotonic()
        if await part.health():
            return True
        if time.monotonic() - began < AT_ONCE_S:
            return False
    return False


def weights_folder(run_dir: Path, root: Path | None) -> Path:
    """In `root`, in memory where none is given. Always the same for one run on one machine, so that
    what a killed server left there is found."""
    run = hashlib.sha256(f"{platform.node()} {run_dir.resolve()}".encode()).hexdigest()[:12]
    if root is None:
        root = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    return root.resolve() / f"fakevllm-weights-{run}"


async def _both(one: Awaitable[object], other: Awaitable[object]) -> None:
    """At the same time, each to its end. Raises what the first raised, else the second."""
    for outcome in await asyncio.gather(one, other, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
