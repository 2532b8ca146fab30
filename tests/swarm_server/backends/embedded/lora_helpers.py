"""Trainers with adapters, after some steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swarm_server.backends.embedded.engine_helpers import (
    SPEC,
    load,
    random_calls,
    train,
)

from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.types.backend import LossSpec

LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8}


QUICK: dict[str, Any] = {"lr": 1e-2, "max_mismatch_k3": None}


IDS = range(7, 40)


def new_trainer(folder: Path) -> PolicyTrainer:
    return PolicyTrainer(load(folder), lambda: load(folder))


def trained(folder: Path, num_steps: int = 2, **job: Any) -> PolicyTrainer:
    trainer = new_trainer(folder)
    for number in range(num_steps):
        step(trainer, number, **job)
    return trainer


def step(
    trainer: PolicyTrainer, number: int, spec: LossSpec = SPEC, **job: Any
) -> dict[str, float]:
    calls = random_calls(6, seed=number)
    metrics = train(trainer, calls, spec, **(LORA | QUICK | {"ppo_epochs": 2} | job))
    assert metrics["skipped"] == 0
    return metrics
