"""Read checkpoints that version 0.8.0 and older wrote, in verl's own format, with the names of
today's format.

Each worker wrote the rows that it had of each tensor to files of its own. Any number of workers can
read these files, because each of them takes the rows that it needs from the files of all workers.
Reading unpickles the files, which can run any code in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fakevllm_server.backends.verl.trainer_arguments import RELEASED_WORKERS_FILE, read_num_workers


class ReleasedCheckpoint:
    """The tensors of a checkpoint."""

    def __init__(self, folder: Path, parameters: Sequence[str]) -> None:
        """Open the files of all workers. Their values are read from the disk only when they are
        used. `parameters` has the names of the model's parameters in the model's order, in which
        the optimizer numbers them."""
        self._shards: dict[str, list[Tensor]] = {}
        self.shapes: dict[str, torch.Size] = {}
        num_workers = read_num_workers(folder)
        for rank in range(num_workers):
            suffix = f"world_size_{num_workers}_rank_{rank}.pt"
            for name, weight in _open(folder / f"model_{suffix}").items():
                self._add(f"weights.{name}", weight)
            for number, slots in _open(folder / f"optim_{suffix}")["state"].items():
                for slot, tensor in slots.items():
                    self._add(f"optimizer.{slot}.{parameters[number]}", tensor)

    @staticmethod
    def is_in(folder: Path) -> bool:
        return (folder / RELEASED_WORKERS_FILE).exists()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Fill tensors with the values of the checkpoint, by name. A tensor may be divided by rows
        among workers. Then only the rows of this worker are filled."""
        for name, target in state.items():
            local, first = target, 0
            if isinstance(target, DTensor):
                local = target.to_local()
                (chunk,) = target.__create_chunk_list__()
                first = chunk.offsets[0]
            copy_rows(self._shards[name], first, local)

    def _add(self, name: str, tensor: Tensor) -> None:
        """Add what a worker has written of a tensor."""
        if not isinstance(tensor, DTensor) or not tensor.placements[0].is_shard():
            self._shards[name] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor]
        else:
            self._shards.setdefault(name, []).append(tensor.to_local())
        self.shapes[name] = tensor.shape


def copy_rows(shards: Sequence[Tensor], first: int, target: Tensor) -> None:
    """Fill `target` with rows of a tensor, beginning with the row number `first`. `shards` are the
    parts of this tensor, one after another.

    >>> rows = torch.zeros(2)
    >>> copy_rows([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], 1, rows)
    >>> rows
    tensor([2., 3.])
    """
    if target.ndim == 0:
        target.copy_(shards[0])
        return
    at = 0
    for shard in shards:
        start, end = max(first, at), min(first + len(target), at + len(shard))
        if start < end:
            target[start - first : end - first].copy_(shard[start - at : end - at])
        at += len(shard)


def _open(file: Path) -> Any:
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)
