"""Checkpoints of version 0.8.0 of the verl trainer, in verl's own format, with the weights after
the next step.

    python -m contract.released_checkpoints FOLDER

writes the archives, with the version that the Python path names.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from contract.trainers import Subject
from transformers import Qwen3Config, Qwen3ForCausalLM

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.process.child_engine import ChildEngine
from fakevllm_server.backends.verl.trainer_arguments import arguments_for_job
from fakevllm_server.types.backend import Call
from fakevllm_server.types.engine_spec import EngineSpec

NUM_WORKERS = 2
JOBS = {
    "all_weights": TrainJob(lr=1e-2, max_mismatch_k3=None),
    "adapters": TrainJob(lr=1e-2, max_mismatch_k3=None, lora_rank=3, seed=5),
}
"""The job of each archive. The rank of the adapters cannot be divided by the number of workers."""
CALLS = [
    Call("g", [5, 6, 7], [8, 9, 10], [math.log(0.02)] * 3, 0, 1.0, 1.0, 1.0),
    Call("g", [5, 6, 7, 11], [12], [math.log(0.02)], 0, 1.0, -1.0, 1.0),
]


def write_model(folder: Path) -> None:
    """Write a model of 8,000 parameters. The base of the adapters is always the same."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model: Any = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)


async def start(model: Path, run_dir: Path, job: TrainJob, num_workers: int) -> Subject:
    """Start a trainer of the small model."""
    run_dir.mkdir(parents=True)
    arguments = [f"--num-workers={num_workers}", *arguments_for_job(job)]
    spec = EngineSpec("verl", run_dir, str(model), "m", extra_args=arguments, train_only=True)
    engine = ChildEngine(spec)
    await engine.launch()
    await engine.boot(job)
    return Subject("verl", engine, run_dir)


async def write_archive(name: str, file: Path) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder, model = Path(root) / name, Path(root) / "model"
        write_model(model)
        job = JOBS[name]
        trainer = await start(model, Path(root) / "run", job, NUM_WORKERS)
        try:
            await trainer.step(CALLS, job)
            (folder / "checkpoint").mkdir(parents=True)
            await trainer.engine.save(folder / "checkpoint")
            await trainer.step(CALLS, job)
            await trainer.engine.export(folder / "next")
            await trainer.engine.restore(folder / "checkpoint")
        finally:
            await trainer.engine.close()
        with tarfile.open(file, "w:gz") as archive:
            archive.add(model, f"{name}/model")
            archive.add(folder, name)


if __name__ == "__main__":
    for archive_name in JOBS:
        target = Path(sys.argv[1]) / f"verl-0.8.0-{archive_name}.tar.gz"
        asyncio.run(write_archive(archive_name, target))
