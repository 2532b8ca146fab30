from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from fakevllm_server.backends.verl.weight_files import write_weights

TENSORS = {f"w{index}": torch.full((4,), float(index)) for index in range(5)}
TENSOR_BYTES = 16


def test_small_weights_are_one_file(tmp_path: Path) -> None:
    write_weights(tmp_path, TENSORS.items())

    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors").keys() == TENSORS.keys()


def test_large_weights_are_shards_with_an_index(tmp_path: Path) -> None:
    write_weights(tmp_path, TENSORS.items(), max_shard_bytes=2 * TENSOR_BYTES)

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * TENSOR_BYTES
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], TENSORS[name])


def test_a_tensor_larger_than_a_shard_has_a_shard_of_its_own(tmp_path: Path) -> None:
    write_weights(tmp_path, TENSORS.items(), max_shard_bytes=1)

    assert len(list(tmp_path.glob("model-*.safetensors"))) == 5
