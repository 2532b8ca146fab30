"""New weights for a paused vLLM: loaded from a folder, or sent by the trainer's process.

Each function ends with a vLLM that serves the new weights, or raises BackendError with a vLLM that
is still paused. The weights of the latter are unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from fakevllm_server.backends.vllm.control_client import ControlClient
from fakevllm_server.types.backend import BackendError
from fakevllm_server.types.weight_transfer import (
    IPC,
    JSON,
    NCCL,
    ExportWeights,
)

log = logging.getLogger("fakevllm.server")


def transfer_engine(*, is_cpu: bool, shares_gpu: bool) -> str:
    """Return the name of vLLM's weight transfer engine for the places of vLLM and the trainer.

    >>> transfer_engine(is_cpu=False, shares_gpu=True)
    'ipc'
    """
    if is_cpu:
        return JSON
    return IPC if shares_gpu else NCCL


async def load_from_folder(client: ControlClient, folder: Path, version: int) -> None:
    """Load the weights in a folder. If the load fails, try once more."""
    try:
        await client.load_weights(folder, version)
    except BackendError as failure:
        log.warning("vLLM did not take the new weights: %s; trying once more", failure)
        # vLLM may have resumed although the request failed.
        await client.pause()
        await client.load_weights(folder, version)


async def receive(
    client: ControlClient,
    transfer: Callable[[], Awaitable[None]],
    export: ExportWeights,
    version: int,
) -> None:
    """Let the trainer send its weights to vLLM. If this fails, load them from a folder."""
    try:
        await transfer()
        await client.serve(version)
    except BackendError as failure:
        log.warning(
            "vLLM did not get the new weights from the trainer: %s; it loads them from a folder",
            failure,
        )
        # vLLM may have resumed although the request failed.
        await client.pause()
        await client.discard_weight_update()
        async with export() as folder:
            await load_from_folder(client, folder, version)
