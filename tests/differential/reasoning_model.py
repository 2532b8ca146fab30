"""A reasoning model made from the demo's model.

Two tokens of its answer "The answer is 7." become the marks that open and close the reasoning:
"<think> answer</think> 7.". Nothing else changes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR

Json = dict[str, Any]

SWAPPED = {"The": "<think>", "Ġis": "</think>"}
"""Pairs of tokens that exchange their ids."""
FLAGS = ("--reasoning-parser", "qwen3")
"""Flags of vLLM. This parser takes the text before the closing mark for reasoning, with or without
an opening mark. With `enable_thinking: false` it looks for no reasoning."""


def create_reasoning_model(folder: Path) -> Path:
    """Write the model into `folder`, a new folder, and return the folder."""
    shutil.copytree(DEMO_MODEL_DIR, folder)
    file = folder / "tokenizer.json"
    content: Json = json.loads(file.read_text())
    ids: dict[str, int] = content["model"]["vocab"]
    for one, other in SWAPPED.items():
        ids[one], ids[other] = ids[other], ids[one]
    for token in content["added_tokens"]:
        token["id"] = ids[token["content"]]
        if token["content"] in SWAPPED.values():
            token["special"] = False  # as in reasoning models; special tokens would not be printed
    file.write_text(json.dumps(content))
    return folder
