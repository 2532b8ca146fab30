"""Weight transports: the ways in which new weights get from a trainer to a rollout engine in
another process.

To add a transport, add a class and an entry in the table WEIGHT_TRANSPORTS.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from fakevllm_server.types.backend import BackendError, Rollout, Trainer
from fakevllm_server.types.weight_transfer import WeightReceiver, WeightSender


class WeightTransport(Protocol):
    """Brings the weights of one trainer into one rollout engine."""

    async def publish(self, version: int, *, takes_adapters: bool) -> None:
        """Load the trainer's weights into the rollout engine, and serve them as `version`.
        `takes_adapters` says whether the engine loads LoRA adapters in place of whole weights."""
        ...


class WeightsFolder:
    """The folder into which a trainer exports its weights, and which is removed afterwards."""

    def __init__(self, path: Path, trainer: Trainer) -> None:
        self._path = path
        self._trainer = trainer

    @asynccontextmanager
    async def exported(self, *, takes_adapters: bool = False) -> AsyncGenerator[Path]:
        """Export the trainer's weights or adapters, and yield the folder. The folder is removed
        when the `with` block ends."""
        try:
            await self._make()
            if takes_adapters:
                await self._trainer.export_adapters(self._path, "trained")
            else:
                await self._trainer.export(self._path)
            yield self._path
        finally:
            await self._remove()

    async def _make(self) -> None:
        await self._remove()
        try:
            self._path.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise BackendError(
                f"new weights cannot be put into {self._path} ({error.strerror}): "
                "name another folder with --weights-dir"
            ) from None

    async def _remove(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._path, ignore_errors=True)


class FolderTransport:
    """The trainer exports its weights to a folder, from which the rollout engine loads them."""

    def __init__(self, rollout: Rollout, trainer: Trainer, folder: Path) -> None:
        self._rollout = rollout
        self._folder = WeightsFolder(folder, trainer)

    async def publish(self, version: int, *, takes_adapters: bool) -> None:
        async with self._folder.exported(takes_adapters=takes_adapters) as folder:
            await self._rollout.load_weights(folder, version)


class VllmTransport:
    """The trainer's process sends its weights to vLLM's own weight transfer routes. If this fails,
    vLLM loads the weights from a folder."""

    def __init__(self, rollout: Rollout, trainer: Trainer, folder: Path) -> None:
        assert isinstance(rollout, WeightReceiver), "the settings allow only rollouts that receive"
        assert isinstance(trainer, WeightSender), "the settings allow only trainers that send"
        self._rollout = rollout
        self._trainer = trainer
        self._folder = WeightsFolder(folder, trainer)

    async def publish(self, version: int, *, takes_adapters: bool) -> None:
        assert not takes_adapters, "the settings refuse this transport for adapters"
        await self._rollout.receive_weights(
            self._trainer.send_weights, self._folder.exported, version
        )


FOLDER = "folder"
WEIGHT_TRANSPORTS: dict[str, Callable[[Rollout, Trainer, Path], WeightTransport]] = {
    FOLDER: FolderTransport,
    "vllm": VllmTransport,
}
"""The transports by name, as the flag `--weight-transport` names them."""
