"""Train one step on exported files, with TRL's trainers and the demo's model, as a user would.

    python trl_step.py FORMAT=LOADER...

A loader is a file with the lines of Python that the command has printed. The output has one line
RESULT JSON for each loader, among what TRL prints. The script runs in a process of its own, because
TRL and torch change the process.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR

TRAINERS = {"messages": "SFT", "sft": "SFT", "preference": "DPO", "kto": "KTO"}
BATCH_SIZE = 4


def load(loader: str) -> Any:
    """Return the rows that the printed lines load."""
    names: dict[str, Any] = {}
    exec(Path(loader).read_text(), names)
    return names["rows"]


def train(format_name: str, rows: Any) -> dict[str, Any]:
    trl: Any = importlib.import_module("trl")
    with tempfile.TemporaryDirectory() as folder:
        name = TRAINERS[format_name]
        config = getattr(trl, f"{name}Config")(
            output_dir=folder,
            max_steps=1,
            per_device_train_batch_size=BATCH_SIZE,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
        )
        trainer = getattr(trl, f"{name}Trainer")(
            str(DEMO_MODEL_DIR), args=config, train_dataset=rows
        )
        prompt = trainer.train_dataset[0]
        tokenizer = trainer.processing_class
        text = tokenizer.decode(prompt.get("input_ids") or prompt["prompt_ids"])
        trainer.train()
        loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return {"text": text, "loss": float(loss)}


if __name__ == "__main__":
    importlib.import_module("torch").set_num_threads(1)
    versions = {name: version(name) for name in ("trl", "datasets", "transformers", "torch")}
    print("RESULT", json.dumps(versions), flush=True)
    for argument in sys.argv[1:]:
        format_name, _, loader = argument.partition("=")
        rows = load(loader)
        result = {"format": format_name, "rows": list(rows)}
        if format_name in TRAINERS:
            result |= train(format_name, rows)
        print("RESULT", json.dumps(result), flush=True)
