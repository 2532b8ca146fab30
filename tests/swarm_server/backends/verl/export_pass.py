"""One of several processes that write the weights of a divided mixture of experts.

    python -m swarm_server.backends.verl.export_pass FOLDER

The environment variables RANK and WORLD_SIZE say which process this is. The folder `gathered` gets
weights that the first process gathers, and `by_rows` gets those that each process writes. The
folder `expected` gets what transformers writes of the undivided model.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from fakevllm_server.backends.verl.weight_export import FolderWeights, write_weights


def mixture_of_experts() -> Any:
    """Return a model whose numbers of rows cannot be divided by two everywhere."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=33,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_experts=3,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return Qwen3MoeForCausalLM(config)


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = mixture_of_experts()
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder / "expected")
        for name in ("gathered", "by_rows"):
            (folder / name).mkdir()
    torch.distributed.barrier()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    weights = FolderWeights(model, torch.float32)
    write_weights(weights, folder / "gathered", is_gathered=True)
    write_weights(weights, folder / "by_rows", is_gathered=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
