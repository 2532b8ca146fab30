"""One of several processes that send the weights of a divided mixture of experts together.

    python -m swarm_server.backends.verl.send_pass FOLDER

The environment variables RANK and WORLD_SIZE say which process this is. The last process sends,
three times: the second time, it fails after two chunks. While they send, they wait longer for each
other. It writes the weights that it sent the
third time to the folder `sent`. The folder `expected` gets what transformers writes of the
undivided model. The first process prints a JSON list with what each sending returned to it.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from swarm_server.backends.verl.export_pass import mixture_of_experts
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fakevllm_server.backends.verl.weight_export import FolderWeights
from fakevllm_server.backends.verl.weight_sending import (
    GatheredWeights,
    changed_timeout,
    send_together,
)
from fakevllm_server.backends.weight_transfer.weight_source import WeightSource, in_chunks
from fakevllm_server.types.backend import BackendError

USUAL_TIMEOUT_S = 300.0
SEND_TIMEOUT_S = 660.0
MAX_CHUNK_BYTES = 2_000


class Receiver:
    """Keeps the weights that are sent to it. It refuses the chunk after `max_chunks`."""

    def __init__(self, max_chunks: int | None = None) -> None:
        self.weights: dict[str, Tensor] = {}
        self._max_chunks = max_chunks

    def receive(self, source: WeightSource) -> None:
        for number, chunk in enumerate(in_chunks(source, MAX_CHUNK_BYTES)):
            if number == self._max_chunks:
                raise BackendError("refused by the test")
            self.weights |= chunk
        sent = [(name, weight.dtype, tuple(weight.shape)) for name, weight in self.weights.items()]
        assert group_timeout_s() == SEND_TIMEOUT_S
        assert sent == [(one.name, one.dtype, one.shape) for one in source.metadata()]


def group_timeout_s() -> float:
    """Return for how long this rank waits for another one."""
    group: Any = torch.distributed.group.WORLD
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=USUAL_TIMEOUT_S))
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks,))
    model: Any = mixture_of_experts()
    if rank == 0:
        model.save_pretrained(folder / "expected")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    outcomes: list[str | None] = []
    for max_chunks in (None, 2, None):
        receiver = Receiver(max_chunks)
        weights = GatheredWeights(FolderWeights(model, torch.float32))
        send = receiver.receive if rank == num_ranks - 1 else None
        with changed_timeout(SEND_TIMEOUT_S, usual_s=USUAL_TIMEOUT_S):
            outcomes.append(send_together(weights, send))
        assert group_timeout_s() == USUAL_TIMEOUT_S
        # This would be another collective operation than a gathering that still waits.
        torch.distributed.barrier()
    if rank == num_ranks - 1:
        assert outcomes == [None, "refused by the test", None], outcomes
        (folder / "sent").mkdir()
        weights = {name: weight.contiguous() for name, weight in receiver.weights.items()}
        save_file(weights, folder / "sent" / "model.safetensors")
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
