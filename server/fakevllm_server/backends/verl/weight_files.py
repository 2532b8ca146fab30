"""The safetensors files of a Hugging Face folder, which several processes can write together.

The place of each weight in the files is known before any weight is written. One process creates the
files. Then each process writes the rows that it has, directly to their final place. A reader must
wait until all processes have written their rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_SHARD_BYTES = 5 * 2**30
"""Maximum size of one file in bytes."""
ALIGNMENT = 8
"""The length of a file's header is a multiple of this number of bytes."""
LENGTH_BYTES = 8
"""Number of bytes at the start of a file that contain the length of the header."""
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of number types in a file's header."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the values of a weight are."""

    file: Path
    offset: int
    """Number of bytes before the first value, counted from the start of the file."""
    row_bytes: int
    """Number of bytes of one row, which is a slice of the weight's first dimension."""


class WeightFiles:
    """The weight files of one folder: `model.safetensors`, or several shard files with an index.

    A shard has at most `max_shard_bytes` bytes of weights. A weight that is larger than this limit
    gets a shard of its own.
    """

    def __init__(
        self,
        folder: Path,
        weights: Iterable[tuple[str, Tensor]],
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        """Plan the files. `weights` has the name of each weight, and a tensor of its shape and its
        dtype. The values of the tensor do not matter, so it may be on torch's device `meta`."""
        self._folder = folder
        self._places: dict[str, _Place] = {}
        self._headers: dict[Path, bytes] = {}
        self._sizes: dict[Path, int] = {}
        shards = _divide(weights, max_shard_bytes)
        for number, shard in enumerate(shards, 1):
            name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}.safetensors"
            self._plan_file(folder / name, shard)

    def _plan_file(self, file: Path, shard: Sequence[tuple[str, Tensor]]) -> None:
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        # Readers expect that the address of each value is a multiple of the value's size.
        for name, weight in sorted(shard, key=lambda item: -item[1].element_size()):
            start, end = end, end + weight.nbytes
            entries[name] = {
                "dtype": DTYPE_NAMES[weight.dtype],
                "shape": list(weight.shape),
                "data_offsets": [start, end],
            }
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % ALIGNMENT)
        self._headers[file] = len(header).to_bytes(LENGTH_BYTES, "little") + header
        self._sizes[file] = end
        for name, weight in shard:
            offset = len(self._headers[file]) + entries[name]["data_offsets"][0]
            row_bytes = weight.nbytes // weight.shape[0] if weight.numel() and weight.ndim else 0
            self._places[name] = _Place(file, offset, row_bytes)

    def create(self) -> None:
        """Create the files in their final size, with their headers and without the weights."""
        for file, header in self._headers.items():
            with file.open("wb") as stream:
                stream.write(header)
                stream.truncate(len(header) + self._sizes[file])
        if len(self._headers) > 1:
            index = {
                "metadata": {"total_size": sum(self._sizes.values())},
                "weight_map": {name: place.file.name for name, place in self._places.items()},
            }
            text = json.dumps(index, indent=2)
            (self._folder / "model.safetensors.index.json").write_text(text)

    def write(self, name: str, rows: Tensor, first_row: int = 0) -> None:
        """Write a weight, or some rows of a weight, beginning with the row number `first_row`. The
        dtype of `rows` must be the dtype of the plan. The files must exist."""
        place = self._places[name]
        values = rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        with place.file.open("r+b") as stream:
            stream.seek(place.offset + first_row * place.row_bytes)
            stream.write(values.numpy().data)


def _divide(
    weights: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> list[list[tuple[str, Tensor]]]:
    shards: list[list[tuple[str, Tensor]]] = [[]]
    size = 0
    for name, weight in weights:
        if shards[-1] and size + weight.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((name, weight))
        size += weight.nbytes
    return shards
