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
from fakevllm_server.backends.weight_transfer.socket_client import ROUTE_TIMEOUT_S

COLLECTIVE_TIMEOUT_S = 600.0
"""Maximum seconds that a worker waits for another worker by default. Without this limit, a frozen
worker stops training for hours."""

MIN_SEND_TIMEOUT_S = 2 * ROUTE_TIMEOUT_S + 60.0
"""Minimum of this limit while the weights are sent to vLLM. The worker that sends waits for two
answers of vLLM in a row before the first weight is gathered, and after the last one. The rest is
for packing a chunk."""

STATE_FOLDER = "state"
"""Folder with the weights and the optimizer's state in a checkpoint, in torch's distributed
checkpoint format."""

WORKERS_FILE = "workers.json"
"""File with the number of workers that saved a checkpoint."""

RELEASED_WORKERS_FILE = "fsdp_config.json"
"""File with the number of workers in a checkpoint of version 0.8.0 or older. No other checkpoint
has it."""

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


def send_timeout_s(collective_timeout_s: float) -> float:
    """Return the maximum seconds that a worker waits for the worker that sends weights to vLLM.

    >>> send_timeout_s(30.0), send_timeout_s(1800.0)
    (660.0, 1800.0)
    """
    return max(collective_timeout_s, MIN_SEND_TIMEOUT_S)


def arguments_for_checkpoint(checkpoint: Path) -> list[str]:
    """Return the arguments for a trainer that only exports a checkpoint. The trainer has as many
    workers as wrote the checkpoint or, if there are fewer GPUs, as many as there are. It has the
    same adapters."""
    workers = [f"--num-workers={read_num_workers(checkpoint)}", "--min-workers=1"]
    lora = read_lora(checkpoint)
    return [*workers, *([] if lora is None else _lora_arguments(lora))]


def read_num_workers(checkpoint: Path) -> int:
    """Return the number of workers that saved a checkpoint."""
    released = checkpoint / RELEASED_WORKERS_FILE
    if released.exists():
        return json.loads(released.read_text())["world_size"]
    return json.loads((checkpoint / WORKERS_FILE).read_text())["num_workers"]


def write_settings(checkpoint: Path, num_workers: int, lora: LoraSettings | None) -> None:
    """Record in a checkpoint how many workers saved it, and with which LoRA settings it was
    trained. The value None stands for a checkpoint of all weights."""
    (checkpoint / WORKERS_FILE).write_text(json.dumps({"num_workers": num_workers}))
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
