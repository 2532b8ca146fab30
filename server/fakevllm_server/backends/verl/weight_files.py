"""Write weights as the safetensors files of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

MAX_SHARD_BYTES = 5 * 2**30
"""Maximum size of one file in bytes. While files are written, the tensors of at most one file and
one further tensor are in memory."""


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write the weights to `model.safetensors`, or to several shard files with an index.

    A shard has at most `max_shard_bytes` bytes. A tensor that is larger than this limit gets a
    shard of its own.
    """
    shard_of_tensor: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    sizes = [0]

    def write_shard() -> None:
        name = f"model-{len(sizes):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        shard_of_tensor.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shard and sizes[-1] + size > max_shard_bytes:
            write_shard()
            sizes.append(0)
        shard[name] = tensor
        sizes[-1] += size
    write_shard()
    if len(sizes) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        return
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": shard_of_tensor}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
