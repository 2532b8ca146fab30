"""The embedded trainer without a sampler, for use with another rollout engine.

The trainer holds one copy of the weights and no KV cache. It also accepts models that the embedded
sampler cannot decode.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.device_and_dtype import resolve_device, resolve_dtype
from fakevllm_server.backends.embedded.model_folder import load_weights, read_config
from fakevllm_server.backends.embedded.train import checkpoint
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.backends.embedded.weights import MergedWeights
from fakevllm_server.backends.process.trainer_thread import SingleThread
from fakevllm_server.backends.weight_transfer.sender import Sender
from fakevllm_server.backends.weight_transfer.weight_source import ConvertedWeights, check_names
from fakevllm_server.types.backend import (
    BackendError,
    Batch,
    Call,
    LossSpec,
    PolicyName,
    StepMetrics,
)
from fakevllm_server.types.weight_transfer import TransferTarget

Result = TypeVar("Result")


class StandaloneTrainer:
    """The embedded trainer without a sampler. It implements the interface TrainEngine. The
    constructor raises BackendError if the model cannot be loaded."""

    def __init__(
        self, model: Path, *, seed: int, device: str, dtype: str, torch_threads: int
    ) -> None:
        self._folder = model
        self._device = resolve_device(device)
        self._dtype = resolve_dtype(dtype, self._device)
        read_config(model)  # raises a one-line BackendError for an unusable folder
        # A checkpoint also contains the sampler's random number generator. This process has no
        # sampler, so the generator never advances.
        self._rng = random.Random(seed)
        self._closing = False
        torch.set_num_threads(torch_threads)
        torch.manual_seed(seed)
        self._trainer = PolicyTrainer(self._starting_weights(), self._starting_weights, self._dtype)
        self._sender = Sender()
        self._thread = SingleThread("trainer", lambda: torch.set_num_threads(torch_threads))

    def close(self) -> None:
        """Stop the trainer. A running step fails after its current forward or backward pass, and
        makes no update after that."""
        self._closing = True

    async def boot(self, job: TrainJob) -> str:
        return await self._run(lambda: self._trainer.boot(job))

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        return await self._run(lambda: self._drive(self._trainer.step(batch, loss)))

    async def log_probs(self, calls: Sequence[Call], policy: PolicyName) -> list[list[float]]:
        return await self._run(lambda: self._drive(self._trainer.log_probs(calls, policy)))

    async def publish(self, version: int) -> None:
        raise BackendError("this process only trains: nothing samples in it")

    async def load_weights(self, folder: Path, version: int) -> None:
        raise BackendError("this process only trains: nothing samples in it")

    async def send_weights(self, target: TransferTarget) -> None:
        await self._run(lambda: self._send_weights(target))

    async def export(self, folder: Path) -> None:
        model = self._trainer.model
        await self._run(lambda: checkpoint.export(folder, model, self._dtype, self._folder))

    async def export_adapters(self, folder: Path, policy: PolicyName) -> None:
        await self._run(lambda: checkpoint.export_adapters(folder, self._trainer, policy))

    async def save(self, folder: Path) -> None:
        await self._run(lambda: checkpoint.save(folder, self._trainer, self._rng))

    async def restore(self, folder: Path) -> None:
        await self._run(lambda: checkpoint.restore(folder, self._trainer, self._rng))

    def _starting_weights(self) -> PreTrainedModel:
        return load_weights(self._folder, torch.float32, self._device)

    async def _run(self, action: Callable[[], Result]) -> Result:
        return await self._thread.run(lambda: _with_freed_cache(action))

    def _send_weights(self, target: TransferTarget) -> None:
        weights = MergedWeights(self._trainer.model)
        check_names(weights.shapes, self._folder)
        self._sender.send(ConvertedWeights(weights, weights.shapes, self._dtype), target)

    def _drive(self, pieces: Generator[None, None, Result]) -> Result:
        while not self._closing:
            try:
                next(pieces)
            except StopIteration as stop:
                return stop.value
        pieces.close()
        raise BackendError("the trainer is shutting down")


def _with_freed_cache(action: Callable[[], Result]) -> Result:
    """Run an action and return its result. Then free what torch's allocator keeps for later, also
    after a failure. A vLLM on the same GPU needs the memory. Without CUDA, nothing is freed."""
    try:
        return action()
    finally:
        torch.cuda.empty_cache()
