"""A small random model folder for tests."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": 0,
    # Wide enough that the random model has opinions, so that a wrong position or mask shows.
    "initializer_range": 0.3,
}


def save_tiny_llama(folder: Path, **settings: Any) -> None:
    """Write a random Llama with the demo model's tokenizer. `folder` must not exist."""
    shutil.copytree(DEMO_MODEL_DIR, folder)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(SIZES | settings))).save_pretrained(folder)
