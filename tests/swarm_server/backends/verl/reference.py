"""Calls to train on, and the expected result: that of the embedded trainer in this process."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from swarm_server.backends.embedded.engine_helpers import finish, load, plain_logprobs
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.embedded.train.checkpoint import export_adapters
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.backends.embedded.weights import MergedWeights
from fakevllm_server.types.backend import Batch, Call, LossSpec, PolicyName, StepMetrics


@cache
def demo_model() -> PreTrainedModel:
    return load(DEMO_MODEL_DIR)


def on_policy_calls(
    count: int = 6, *, mixed: bool = False, seed: int = 0, shared_tokens: int = 0
) -> list[Call]:
    """Create calls with random tokens and the demo model's own log-probabilities. With `mixed`,
    each call has another temperature and weight. All prompts begin with the same `shared_tokens`
    tokens."""
    rng = random.Random(seed)
    shared = [rng.randrange(7, 300) for _ in range(shared_tokens)]
    calls: list[Call] = []
    for index in range(count):
        prompt = [*shared, *(rng.randrange(7, 300) for _ in range(rng.randrange(1, 12)))]
        response = [rng.randrange(7, 300) for _ in range(rng.randrange(1, 16))]
        temperature = rng.choice([0.7, 1.0, 1.3]) if mixed else 1.0
        table = plain_logprobs(demo_model(), [*prompt, *response], temperature)
        logprobs = [table[len(prompt) - 1 + at, token].item() for at, token in enumerate(response)]
        weight = rng.choice([0.25, 0.5, 1.0]) if mixed else 1.0
        advantage = (-1.0) ** index * (0.5 + rng.random())
        calls.append(
            Call(f"g{index}", prompt, response, logprobs, 0, temperature, advantage, weight)
        )
    return calls


def stale(calls: list[Call], seed: int = 0) -> list[Call]:
    """Change the log-probabilities as if other weights had sampled, so that clipping occurs."""
    rng = random.Random(seed)
    return [
        replace(call, logprobs=[value + rng.uniform(-0.5, 0.5) for value in call.logprobs])
        for call in calls
    ]


class Reference:
    def __init__(self, job: TrainJob) -> None:
        self.job = job
        self._trainer = PolicyTrainer(load(DEMO_MODEL_DIR), lambda: load(DEMO_MODEL_DIR))
        self._trainer.boot(job)

    def step(self, calls: list[Call]) -> StepMetrics:
        return self.step_of(Batch(1, calls))

    def step_of(self, batch: Batch) -> StepMetrics:
        return finish(self._trainer.step(batch, LossSpec.of(self.job)))

    def export_adapters(self, folder: Path, policy: PolicyName) -> dict[str, Tensor]:
        """Write the adapters to a folder, and return them."""
        export_adapters(folder, self._trainer, policy)
        return weights_in(folder)

    def assert_same_weights(self, folder: Path, max_outliers: int = 0) -> None:
        """Check that the weights in a folder are the expected weights, except for rounding. The
        expected weights contain the adapters, if any.

        The norm of all differences must be small, relative to the norm of the change by training.
        AdamW divides by gradients near zero, so single weights may differ by a part of the learning
        rate. All but `max_outliers` weights must differ by less than a tenth of it.
        """
        own, exported = dict(MergedWeights(self._trainer.model)), weights_in(folder)
        assert exported.keys() == own.keys()
        start = dict(demo_model().named_parameters())
        moved = torch.cat([(own[name] - start[name]).flatten() for name in own])
        difference = torch.cat([(exported[name] - own[name]).flatten() for name in own])
        assert moved.norm() > 0
        assert difference.norm() < 1e-3 * moved.norm()
        assert (difference.abs() >= self.job.lr / 10).sum() <= max_outliers


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Return the fake engine's only parameter, or the weights of a Hugging Face folder."""
    theta = folder / "theta.json"
    if theta.exists():
        return {"theta": torch.frombuffer(bytearray(theta.read_bytes()), dtype=torch.uint8)}
    weights: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    assert weights, f"{folder} has no weights"
    return weights


def have_same_weights(first: Path, second: Path) -> bool:
    """Compare the weights of two folders bit by bit."""
    ours, theirs = weights_in(first), weights_in(second)
    return ours.keys() == theirs.keys() and all(
        torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )


def assert_transformers_load(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    loaded = dict(model.named_parameters())
    for name, tensor in weights_in(folder).items():
        assert torch.equal(loaded[name], tensor), name
    assert AutoTokenizer.from_pretrained(folder).chat_template
