"""Train one step on exported files, with TRL's trainers and the demo's model, as a user would.

    python trl_step.py FORMAT=FILE...

The output has one line RESULT JSON for each file, among what TRL prints. The script runs in a
process of its own, because TRL and torch change the process.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from importlib.metadata import version
from typing import Any

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR

TRAINERS = {"messages": "SFT", "sft": "SFT", "preference": "DPO", "kto": "KTO"}
BATCH_SIZE = 4


def train(format_name: str, file: str) -> dict[str, Any]:
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    kind = "parquet" if file.endswith(".parquet") else "json"
    with tempfile.TemporaryDirectory() as folder:
        rows = datasets.load_dataset(kind, data_files=file, split="train", cache_dir=folder)
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
    return {"format": format_name, "num_rows": len(rows), "text": text, "loss": float(loss)}


def load(file: str) -> dict[str, Any]:
    """Load a file of the format `groups`, which no trainer reads."""
    datasets: Any = importlib.import_module("datasets")
    kind = "parquet" if file.endswith(".parquet") else "json"
    with tempfile.TemporaryDirectory() as folder:
        rows = datasets.load_dataset(kind, data_files=file, split="train", cache_dir=folder)
        siblings = [len(row["siblings"]) for row in rows]
    return {"format": "groups", "num_rows": len(rows), "num_siblings": siblings}


if __name__ == "__main__":
    importlib.import_module("torch").set_num_threads(1)
    versions = {name: version(name) for name in ("trl", "datasets", "transformers", "torch")}
    print("RESULT", json.dumps(versions), flush=True)
    for argument in sys.argv[1:]:
        format_name, _, file = argument.partition("=")
        result = load(file) if format_name == "groups" else train(format_name, file)
        print("RESULT", json.dumps(result), flush=True)
