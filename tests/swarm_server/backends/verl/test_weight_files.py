from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fakevllm_server.backends.verl.weight_files import DTYPE_NAMES, WeightFiles

TENSORS = {f"w{index}": torch.full((4,), float(index)) for index in range(5)}
TENSOR_BYTES = 16


def write(folder: Path, max_shard_bytes: int = 2**30) -> None:
    files = WeightFiles(folder, TENSORS.items(), max_shard_bytes)
    files.create()
    for name, tensor in TENSORS.items():
        files.write(name, tensor)


def test_small_weights_are_one_file(tmp_path: Path) -> None:
    write(tmp_path)

    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers demands it


def test_large_weights_are_shards_with_an_index(tmp_path: Path) -> None:
    write(tmp_path, max_shard_bytes=2 * TENSOR_BYTES)

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * TENSOR_BYTES
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], TENSORS[name])


def test_a_tensor_larger_than_a_shard_has_a_shard_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, max_shard_bytes=1)

    assert len(list(tmp_path.glob("model-*.safetensors"))) == 5


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 3), (3, 2, 2)], ids=str)
def test_each_number_type_and_shape_is_read_back_as_it_was_written(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """The types come in an order in which their values would not be aligned."""
    weights = {
        name: torch.randint(0, 2, shape).to(dtype)
        for dtype, name in sorted(DTYPE_NAMES.items(), key=lambda item: item[0].itemsize)
    }
    planned = [(name, torch.empty_like(weight, device="meta")) for name, weight in weights.items()]
    files = WeightFiles(tmp_path, planned)
    files.create()
    for name, weight in weights.items():
        files.write(name, weight)

    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert loaded[name].dtype == weight.dtype and torch.equal(loaded[name], weight), name


def test_rows_that_two_writers_write_in_any_order_are_one_weight(tmp_path: Path) -> None:
    weights = {"a": torch.randn(5, 3), "b": torch.randn(2, 2, 2).to(torch.bfloat16)}
    first = WeightFiles(tmp_path, weights.items())
    first.create()
    second = WeightFiles(tmp_path, weights.items())
    for name, weight in weights.items():
        second.write(name, weight[2:], first_row=2)
        first.write(name, weight[:2])

    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
