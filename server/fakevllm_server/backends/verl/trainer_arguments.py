"""Command-line arguments with which the server starts the verl trainer.

The trainer's workers build their models when they start, before the trainer knows its job or its
checkpoint. Therefore the settings that change the model are arguments of the process. This module
imports neither torch nor verl.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.training.lora_settings import LoraSettings

LORA_FILE = "lora.json"
"""File with the LoRA settings in a checkpoint. A checkpoint of all weights does not have it."""

ADAPTERS_FOLDER = "adapters"
"""Folder with the adapters in a checkpoint, in the layout of the peft library. Whoever needs only
the adapters then starts no workers."""


def arguments_for_job(job: TrainJob) -> list[str]:
    """Return the arguments for a trainer that trains a job.

    With `--keep-reference`, the workers copy the initial weights before training changes them. A
    job with LoRA does not need the copy, because the model without its adapters has the initial
    weights.
    """
    lora = LoraSettings.of(job)
    arguments = [] if lora is None else [*_lora_arguments(lora), f"--lora-seed={job.seed}"]
    if job.needs_reference and lora is None:
        arguments.append("--keep-reference")
    if job.gradient_checkpointing:
        arguments.append("--gradient-checkpointing")
    return arguments


def arguments_for_checkpoint(checkpoint: Path) -> list[str]:
    """Return the arguments for a trainer that only exports a checkpoint. The trainer needs as many
    workers as wrote the checkpoint, and the same adapters."""
    num_workers = json.loads((checkpoint / "fsdp_config.json").read_bytes())["world_size"]
    lora = read_lora(checkpoint)
    return [f"--num-workers={num_workers}", *([] if lora is None else _lora_arguments(lora))]


def write_lora(checkpoint: Path, lora: LoraSettings | None) -> None:
    """Record in a checkpoint with which LoRA settings it was trained. The value None stands for a
    checkpoint of all weights."""
    if lora is not None:
        (checkpoint / LORA_FILE).write_text(json.dumps(lora.to_json()))


def read_lora(checkpoint: Path) -> LoraSettings | None:
    """Return the LoRA settings of a checkpoint, or None for a checkpoint of all weights."""
    file = checkpoint / LORA_FILE
    if not file.exists():
        return None
    settings: dict[str, Any] = json.loads(file.read_text())
    return LoraSettings(**settings)


def _lora_arguments(lora: LoraSettings) -> list[str]:
    return [
        f"--lora-rank={lora.rank}",
        f"--lora-alpha={lora.alpha}",
        f"--target-modules={lora.target_modules}",
    ]
