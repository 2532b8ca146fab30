"""The sending side of a weight transfer, in the trainer's process or in one of verl's workers.

The vLLM that receives is paused. If sending fails, vLLM may have a part of the new weights. The
server then loads the weights from a folder.

`nccl` and `ipc` use vLLM's own code, which is imported when it is first needed. They have not been
run on a GPU yet.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import base64
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from typing import Any

from safetensors.torch import save

from fakevllm_server.backends.weight_transfer.socket_client import SocketClient
from fakevllm_server.backends.weight_transfer.weight_source import WeightSource, in_chunks
from fakevllm_server.types.weight_transfer import IPC, JSON, NCCL, TransferTarget

LOOPBACK = "127.0.0.1"
BROKEN_GROUP_EXIT_CODE = 70
"""Exit code of a trainer, or of verl's worker, whose NCCL group is broken. The server starts the
trainer again."""

log = logging.getLogger("fakevllm.trainer")


class Sender:
    """Sends weights to one vLLM after the other. A connection between processes is made once for
    each vLLM, and is kept."""

    def __init__(self) -> None:
        self._socket: str | None = None
        """Socket of the vLLM to which the connection leads."""
        self._connection: Any = None
        """vLLM's NCCL communicator, or True if the engine needs no connection."""

    def send(self, source: WeightSource, target: TransferTarget) -> None:
        """Send all weights to vLLM. Raises BackendError if vLLM does not take them."""
        client = SocketClient(target.socket)
        connect, send = ENGINES[target.engine]
        if self._socket != target.socket:
            self._connection = connect(client, target)
            self._socket = target.socket
        send(source, client, target, self._connection)


def _connect_json(client: SocketClient, target: TransferTarget) -> bool:
    client.init_weight_transfer_engine({})
    return True


def _send_json(
    source: WeightSource, client: SocketClient, target: TransferTarget, connection: object
) -> None:
    client.start_weight_update()
    for chunk in in_chunks(source, target.max_chunk_bytes):
        weights = {name: weight.cpu().contiguous() for name, weight in chunk.items()}
        client.update_weights({"weights": base64.b64encode(save(weights)).decode()})
    client.finish_weight_update()


def _connect_ipc(client: SocketClient, target: TransferTarget) -> bool:
    client.init_weight_transfer_engine({"packed": True})
    return True


def _send_ipc(
    source: WeightSource, client: SocketClient, target: TransferTarget, connection: object
) -> None:
    """Send handles of a buffer in the memory of the GPU, which vLLM and the trainer share.

    vLLM's class for trainers is not used. It would let all processes of torch's process group send,
    and wait for all of them after each chunk.
    """
    import torch
    from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

    # vLLM refuses a weight that is larger than its buffer.
    buffer_bytes = max([target.max_chunk_bytes, *(one.num_bytes for one in source.metadata())])
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    client.start_weight_update()
    # vLLM has read the buffer when it has answered.
    for chunk in packed_ipc_producer(iter(source), gpu, itemgetter(1), buffer_bytes):
        client.update_weights(
            {
                "names": chunk.names,
                "dtype_names": chunk.dtype_names,
                "shapes": chunk.shapes,
                "ipc_handles": chunk.ipc_handle,
                "tensor_sizes": chunk.tensor_sizes,
            }
        )
    client.finish_weight_update()
    torch.cuda.ipc_collect()


def _connect_nccl(client: SocketClient, target: TransferTarget) -> Any:
    """Return an NCCL group of the trainer, which is rank 0, and of vLLM's workers."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    info = {
        "master_address": LOOPBACK,
        "master_port": _free_port(),
        "world_size": 1 + target.world_size,
    }
    with ThreadPoolExecutor(1) as threads:  # the two sides wait for each other
        worker_side = threads.submit(client.init_weight_transfer_engine, info | {"rank_offset": 1})
        worker_side.add_done_callback(_end_if_failed)
        group = NCCLWeightTransferEngine.trainer_init(info)
        worker_side.result()
    return group


def _send_nccl(
    source: WeightSource, client: SocketClient, target: TransferTarget, connection: Any
) -> None:
    import torch
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerSendWeightsArgs,
        NCCLWeightTransferEngine,
    )

    metadata = source.metadata()
    info = {
        "names": [weight.name for weight in metadata],
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in metadata],
        "shapes": [list(weight.shape) for weight in metadata],
        "packed": True,
    }
    torch.cuda.synchronize()  # vLLM's code reads the weights on streams of its own
    client.start_weight_update()
    with ThreadPoolExecutor(1) as threads:  # vLLM receives while the trainer broadcasts
        worker_side = threads.submit(client.update_weights, info)
        worker_side.add_done_callback(_end_if_failed)
        NCCLWeightTransferEngine.trainer_send_weights(
            iter(source), NCCLTrainerSendWeightsArgs(group=connection, packed=True)
        )
        worker_side.result()
    client.finish_weight_update()


def _end_if_failed(worker_side: Future[None]) -> None:
    """End this process if vLLM's side of a collective operation has failed. The trainer's
    side would wait for vLLM forever, and NCCL cannot be interrupted."""
    failure = worker_side.exception()
    if failure is not None:
        log.error("the NCCL group with vLLM is broken, this process ends: %s", failure)
        os._exit(BROKEN_GROUP_EXIT_CODE)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return listener.getsockname()[1]


Connect = Callable[[SocketClient, TransferTarget], Any]
Send = Callable[[WeightSource, SocketClient, TransferTarget, Any], None]
ENGINES: dict[str, tuple[Connect, Send]] = {
    JSON: (_connect_json, _send_json),
    IPC: (_connect_ipc, _send_ipc),
    NCCL: (_connect_nccl, _send_nccl),
}
"""How weights get to vLLM, by the name of vLLM's weight transfer engine."""
