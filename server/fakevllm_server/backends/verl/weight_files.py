"""Weights as a Hugging Face folder holds them: safetensors, in parts where they are many."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

MAX_PART_BYTES = 5 * 2**30
"""Also the most that is held in memory while writing, but for one tensor."""


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_part_bytes: int = MAX_PART_BYTES
) -> None:
    """One `model.safetensors`, or parts and their index."""
    place: dict[str, str] = {}
    part: dict[str, Tensor] = {}
    sizes = [0]

    def write_part() -> None:
        name = f"model-{len(sizes):05d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        place.update(dict.fromkeys(part, name))
        part.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if part and sizes[-1] + size > max_part_bytes:
            write_part()
            sizes.append(0)
        part[name] = tensor
        sizes[-1] += size
    write_part()
    if len(sizes) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        return
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
