"""Measure the peak memory of a training step, with and without gradient checkpointing (Linux only).

    PYTHONPATH=.:server:adapters:tests python -m swarm_server.backends.embedded.step_memory

prints for each step how much its peak memory is above the memory that its process held before. Each
step runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from swarm_server.backends.embedded.engine_helpers import SPEC, finish
from transformers import LlamaConfig, LlamaForCausalLM

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.types.backend import Batch, Call

PROMPT, RESPONSE, SIBLINGS = 512, 256, 8
JOBS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "all weights, recomputed": {"gradient_checkpointing": True},
    "LoRA of rank 8": {"lora_rank": 8},
    "LoRA of rank 8, recomputed": {"lora_rank": 8, "gradient_checkpointing": True},
}


def model(num_layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config).eval()


def calls() -> list[Call]:
    prompt = [index % 2000 for index in range(PROMPT)]
    return [
        Call(
            "g",
            prompt,
            [(7 * at + index) % 2000 for at in range(RESPONSE)],
            [-7.6] * RESPONSE,
            0,
            1.0,
            (-1.0) ** index,
            1.0,
        )
        for index in range(SIBLINGS)
    ]


def measure(name: str, num_layers: int) -> None:
    torch.set_num_threads(1)
    trainer = PolicyTrainer(model(num_layers), lambda: model(num_layers))
    trainer.boot(TrainJob(lr=1e-5, max_mismatch_k3=None, **JOBS[name]))
    before = _peak_mib()
    started = time.perf_counter()
    metrics = finish(trainer.step(Batch(1, calls()), SPEC))
    seconds = time.perf_counter() - started
    result = {"mib": _peak_mib() - before, "seconds": seconds, "grad_norm": metrics["grad_norm"]}
    print(json.dumps(result))


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--job", choices=JOBS)
    options = parser.parse_args()
    if options.job:
        return measure(options.job, options.layers)
    tokens = PROMPT + SIBLINGS * RESPONSE
    print(f"{options.layers} layers, {tokens} tokens in one piece, float32, one thread")
    for name in JOBS:
        command = [
            sys.executable,
            "-m",
            "swarm_server.backends.embedded.step_memory",
            "--job",
            name,
        ]
        command += ["--layers", str(options.layers)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        outcome = json.loads(done.stdout)
        print(
            f"{name:28} {outcome['mib']:6.0f} MiB  {outcome['seconds']:5.1f} s  "
            f"grad_norm {outcome['grad_norm']:.6f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
