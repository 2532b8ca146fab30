"""The weights that a trainer sends, by the names that they have in a model folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from fakevllm_server.types.backend import BackendRefused


@dataclass(frozen=True, slots=True)
class WeightMetadata:
    """Name, type and shape of one weight."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightSource(Protocol):
    """The weights that a trainer sends, in the type in which they are sent. An iteration yields the
    names and the weights one by one, so no second copy of the model is in memory.

    The protocol has the methods of vLLM's class WeightSource, but does not need vLLM.
    """

    def metadata(self) -> list[WeightMetadata]:
        """Return the metadata of all weights, in the order of the iteration."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class ConvertedWeights:
    """The weights of a model in this process. Each iteration yields the weights of that moment. A
    weight is converted when it is yielded."""

    def __init__(
        self, weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], dtype: torch.dtype
    ) -> None:
        self._weights = weights
        self._shapes = shapes
        self._dtype = dtype

    def metadata(self) -> list[WeightMetadata]:
        return [
            WeightMetadata(name, self._dtype, tuple(self._shapes[name])) for name in self._weights
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._weights:
            yield name, self._weights[name].detach().to(self._dtype)


def in_chunks(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield weights in groups of at most `max_bytes`. A larger weight is a group alone. The weights
    of a group, and one more, are read at the same time."""
    chunk: dict[str, Tensor] = {}
    num_bytes = 0
    for name, weight in weights:
        if chunk and num_bytes + weight.nbytes > max_bytes:
            yield chunk
            chunk, num_bytes = {}, 0
        chunk[name] = weight
        num_bytes += weight.nbytes
    if chunk:
        yield chunk


def check_names(names: Iterable[str], folder: Path) -> None:
    """Raise BackendRefused if some weights have other names in memory than in the model folder.

    vLLM knows the names in the folder. For most models they are the same. transformers renames or
    joins the weights of some models, such as mixtures of experts, when it loads them.
    """
    unknown = sorted(set(names) - _names_in(folder))
    if unknown:
        raise BackendRefused(
            f"the trainer has weights that {folder} does not have under the same name, such as "
            f"{unknown[0]}: start the server with --weight-transport folder"
        )


def _names_in(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return set(json.loads(index.read_text())["weight_map"])
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            names |= set(weights.keys())
    return names
