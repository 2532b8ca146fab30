"""The embedded trainer without a sampler gives memory back to a vLLM on the same GPU."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import SPEC, random_calls

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.train.standalone_trainer import StandaloneTrainer
from fakevllm_server.types.backend import BackendError, Batch
from fakevllm_server.types.weight_transfer import JSON, TransferTarget

CALLS = random_calls(2)
JOB = TrainJob(lora_rank=2, micro_batch_tokens=100_000, max_mismatch_k3=None)

Action = Callable[[StandaloneTrainer, Path], Awaitable[Any]]
ACTIONS: dict[str, Action] = {
    "step": lambda trainer, folder: trainer.step(Batch(1, CALLS), SPEC),
    "log_probs": lambda trainer, folder: trainer.log_probs(CALLS, "trained"),
    "export": lambda trainer, folder: trainer.export(folder / "weights"),
    "export_adapters": lambda trainer, folder: trainer.export_adapters(folder, "trained"),
    "save": lambda trainer, folder: trainer.save(folder),
}
FAILING: dict[str, Action] = {
    "step": lambda trainer, folder: trainer.step(Batch(1, CALLS), SPEC),
    "send_weights": lambda trainer, folder: trainer.send_weights(
        TransferTarget(str(folder / "nobody-listens"), JSON)
    ),
}


class EmptyCache:
    """Counts how often torch's cache is freed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> EmptyCache:
    cache = EmptyCache()
    monkeypatch.setattr(torch.cuda, "empty_cache", cache)
    return cache


async def booted(model: Path) -> StandaloneTrainer:
    trainer = StandaloneTrainer(model, seed=0, device="cpu", dtype="auto", torch_threads=1)
    await trainer.boot(JOB)
    return trainer


@pytest.mark.parametrize("name", ACTIONS)
async def test_torchs_cache_is_freed_once_after_each_action(
    name: str, tiny_folder: Path, tmp_path: Path, cache: EmptyCache
) -> None:
    trainer = await booted(tiny_folder)
    cache.count = 0
    await ACTIONS[name](trainer, tmp_path)
    assert cache.count == 1


@pytest.mark.parametrize("name", FAILING)
async def test_torchs_cache_is_freed_after_an_action_that_fails(
    name: str, tiny_folder: Path, tmp_path: Path, cache: EmptyCache
) -> None:
    trainer = await booted(tiny_folder)
    cache.count = 0
    if name == "step":
        trainer.close()
    with pytest.raises(BackendError):
        await FAILING[name](trainer, tmp_path)
    assert cache.count == 1
