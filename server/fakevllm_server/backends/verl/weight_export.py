"""Write the weights of a model that FSDP has sharded, as a Hugging Face folder has them.

If all workers are on one machine, each worker writes its own rows of each weight. No worker then
needs memory for a full weight, and all of them write at the same time.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from verl.utils.model import convert_weight_keys
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from fakevllm_server.backends.embedded.weights import MergedWeights
from fakevllm_server.backends.verl.weight_files import WeightFiles


class FolderWeights:
    """The weights of a model under the names of a model folder, in the type of an export. LoRA
    adapters are merged. A weight is converted and merged when it is read, and stays divided."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Floating-point weights are converted to `dtype`."""
        self._model = model
        self._merged = MergedWeights(model)
        self._own_names = _names_in_folder(model, self._merged)
        self._empty = {
            name: _empty(self._merged.unmerged[own], dtype) for name, own in self._own_names.items()
        }
        self.parts = {name: self.split(name, tensor) for name, tensor in self._empty.items()}
        """The weights into which each weight is split in a folder, by name, as tensors without
        values."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._own_names)

    def read(self, name: str) -> Tensor:
        """Return this worker's part of a weight."""
        return self._merged[self._own_names[name]].to(self._empty[name].dtype)

    def split(self, name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
        """Split a weight that contains the weights of several experts into one weight for each
        expert, which is the form in a model folder. Return any other weight as it is."""
        return list(unfuse_moe_params([(name, weight)], self._model.config.model_type))


def write_weights(weights: FolderWeights, folder: Path, *, is_gathered: bool) -> None:
    """Write the weights of a model to safetensors files. All workers must call this function
    together.

    If `is_gathered` is true, the first worker gathers and writes each weight. This is necessary if
    the workers are on several nodes: the rows of two workers may be in one block of a file, and
    some network file systems lose data if two nodes write to one block.
    """
    files = WeightFiles(folder, [part for parts in weights.parts.values() for part in parts])
    is_first = torch.distributed.get_rank() == 0
    if is_first:
        files.create()
    torch.distributed.barrier()
    for name in weights:
        weight = weights.read(name)
        is_split = len(weights.parts[name]) > 1
        if _is_divided_by_rows(weight) and not (is_split or is_gathered):
            (rows,) = weight.__create_chunk_list__()
            files.write(name, weight.to_local(), rows.offsets[0])
            continue
        full = gather(weight)
        if is_first:
            for part, tensor in weights.split(name, full):
                files.write(part, tensor)
    torch.distributed.barrier()


def gather(weight: Tensor) -> Tensor:
    """Return the full tensor of a weight. All workers must call this function together."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _is_divided_by_rows(weight: Tensor) -> TypeGuard[DTensor]:
    return isinstance(weight, DTensor) and weight.placements == (Shard(0),)


def _names_in_folder(model: PreTrainedModel, merged: MergedWeights) -> dict[str, str]:
    """Return the name of each weight in `merged`, by the weight's name in a model folder. If
    several weights are tied, only one of them is included."""
    network: Any = model
    is_tied = network.config.get_text_config().tie_word_embeddings
    tied = set(getattr(network, "_tied_weights_keys", None) or ()) if is_tied else set()
    names: Any = {name: name for name in merged if name not in tied}
    return convert_weight_keys(names, network)


def _empty(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor without values. It has the shape and the dtype of an exported weight."""
    exported = dtype if weight.is_floating_point() else weight.dtype
    return torch.empty(weight.shape, dtype=exported, device="meta")
