"""The demo's model as one that thinks: two tokens of its answers, "The answer is 7.", become those
that open and close its reasoning, "<think> answer</think> 7.", and nothing else of it changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR

Json = dict[str, Any]

TAKEN = {"The": "<think>", "Ġis": "</think>"}
"""Each of two tokens gets the id of the other."""
FLAGS = ("--reasoning-parser", "qwen3")
"""A parser that takes for reasoning what stands before the second, whether or not the first was
written, and looks for none with `enable_thinking: false`."""


def thinking_model(folder: Path) -> Path:
    """Writes the model into `folder`, which is made, and returns it."""
    shutil.copytree(DEMO_MODEL_DIR, folder)
    file = folder / "tokenizer.json"
    told: Json = json.loads(file.read_text())
    ids: dict[str, int] = told["model"]["vocab"]
    for one, other in TAKEN.items():
        ids[one], ids[other] = ids[other], ids[one]
    for token in told["added_tokens"]:
        token["id"] = ids[token["content"]]
        if token["content"] in TAKEN.values():
            token["special"] = False  # as in models that think: a special one would not be printed
    file.write_text(json.dumps(told))
    return folder
