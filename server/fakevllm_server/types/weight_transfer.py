"""Interfaces through which the trainer's process sends new weights to vLLM, without a folder."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

NCCL = "nccl"
IPC = "ipc"
JSON = "fakevllm_json"
"""Names of vLLM's weight transfer engines, as `vllm serve --weight-transfer-config` takes them. The
first two are vLLM's own. The third is this project's, and needs no GPU."""

MAX_CHUNK_BYTES = 64 * 2**20
"""Largest sum of the sizes of the weights that are sent in one request. A larger single weight is
sent alone."""


@dataclass(frozen=True, slots=True)
class TransferTarget:
    """The vLLM to which a trainer sends weights. vLLM must be paused."""

    socket: str
    """Path of vLLM's Unix socket."""
    engine: str
    """Name of vLLM's weight transfer engine: NCCL, IPC or JSON."""
    world_size: int = 1
    """Number of vLLM's worker processes."""
    max_chunk_bytes: int = MAX_CHUNK_BYTES


SendWeights = Callable[[TransferTarget], Awaitable[None]]
"""Function that sends the trainer's weights to a vLLM."""
ExportWeights = Callable[[], AbstractAsyncContextManager[Path]]
"""Function that writes the trainer's weights to a folder. The folder is removed when the context
ends."""


@runtime_checkable
class WeightSender(Protocol):
    """Interface of a trainer that can send its weights to a vLLM."""

    async def send_weights(self, target: TransferTarget) -> None:
        """Send the trainer's weights to a vLLM, with LoRA adapters merged. If this fails, vLLM may
        have a part of the new weights."""
        ...


@runtime_checkable
class WeightReceiver(Protocol):
    """Interface of a rollout engine that can receive weights from a trainer's process."""

    async def receive_weights(self, send: SendWeights, export: ExportWeights, version: int) -> None:
        """Let the trainer send its weights to the engine, and serve them as `version`.

        If `send` fails, the engine loads the weights from the folder of `export` instead. No
        request is answered before all weights are loaded. Requests that arrive meanwhile may have
        to wait. They are not refused. Raises BackendError if the engine has not got the weights in
        either way.
        """
        ...


@runtime_checkable
class Sleeper(Protocol):
    """Interface of a rollout engine that can free its memory while a trainer uses the same GPU."""

    async def sleep(self) -> None:
        """Wait until running calls have ended, but not forever. Then free the engine's memory.
        Calls that arrive later wait, until new weights are loaded or `wake_up` is called."""
        ...

    async def wake_up(self) -> None:
        """If the engine sleeps, serve again with the weights that it had before. Otherwise do
        nothing."""
        ...
