"""Demonstrations for tests, and the gradient that a training step takes from them in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from swarm_server.backends.embedded.engine_helpers import finish, load

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.types.backend import Batch, Call, LossSpec, StepMetrics
from fakevllm_server.types.demonstrations import Demonstration, DemonstrationKind

KINDS_OF_LOSS: dict[str, tuple[DemonstrationKind, ...]] = {
    "sft": ("plain",),
    "dpo": ("chosen", "rejected"),
    "kto": ("desirable", "undesirable", "undesirable"),
}
NUM_GROUPS = 6


def demonstrations_for(loss: str, seed: int = 0) -> list[Demonstration]:
    """Return demonstrations for a loss. The responses of a group share their prompt, except for
    `kto`, where each has a prompt and a group of its own, as in TRL's batches without equal
    prompts. In `kto`, the first row is so long that no mismatched pair is left out."""
    rng = random.Random(seed)

    def ids(longest: int) -> list[int]:
        return [rng.randrange(7, 512) for _ in range(rng.randrange(2, longest))]

    rows: list[Demonstration] = []
    for group in range(NUM_GROUPS):
        prompt = ids(20)
        for kind in KINDS_OF_LOSS[loss]:
            pair = f"g{group}" if loss == "dpo" else None
            if loss == "kto":
                prompt = ids(20) if rows else [rng.randrange(7, 512) for _ in range(40)]
            group_id = f"g{len(rows)}" if loss == "kto" else f"g{group}"
            rows.append(Demonstration(group_id, prompt, ids(12), kind, pair))
    return rows


def wide_model(folder: Path, seed: int | None = None) -> Any:
    """Return the model in float64. With a seed, its weights are moved a little."""
    model: Any = load(folder).double()
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.02 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


def gradient_of_step(
    folder: Path,
    job: TrainJob,
    demonstrations: Sequence[Demonstration],
    calls: Sequence[Call] = (),
) -> tuple[torch.Tensor, StepMetrics]:
    """Return the gradient and the metrics of one step of the embedded trainer. The policy is the
    model with moved weights, and the reference policy is the model itself."""
    model = wide_model(folder, seed=1)
    trainer = PolicyTrainer(model, partial(wide_model, folder), torch.float64)
    trainer.boot(job.model_copy(update={"grad_clip": 1e9, "max_mismatch_k3": None}))
    gradients: list[torch.Tensor] = []
    trainer.optimizer.register_step_pre_hook(lambda *_: gradients.append(gradient_of(model)))
    batch = Batch(1, calls, demonstrations=demonstrations)
    metrics = finish(trainer.step(batch, LossSpec.of(job)))
    return gradients[0], metrics


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat([weight.grad.flatten().clone() for weight in model.parameters()])
