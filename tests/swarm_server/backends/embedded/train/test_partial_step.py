"""Failing steps: the state of the weights, and the error that the server receives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import uvicorn
from swarm_server.backends.embedded.engine_helpers import SPEC, load, random_calls, train, weights

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.train.standalone_trainer import StandaloneTrainer
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.backends.http.engine_server import create_app
from fakevllm_server.backends.http.preparation import PreparationThreads
from fakevllm_server.backends.process.child_engine import URL, ChildEngine
from fakevllm_server.backends.torch_losses import LOSSES
from fakevllm_server.backends.training.failed_step import PartialStep
from fakevllm_server.types.backend import ActionFailed, BackendError, Batch
from fakevllm_server.types.engine_spec import EngineSpec

CALLS = random_calls(2)
JOB = TrainJob(lr=1e-3, ppo_epochs=2, micro_batch_tokens=100_000, max_mismatch_k3=None)

Plant = Callable[[int], None]


@pytest.fixture
def fail_at(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Make the n-th call of the loss raise, counted from 1. For a batch in one piece, the loss is
    called once per epoch."""
    loss, num_left = LOSSES["vanilla"], 0

    def failing(*arguments: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            raise RuntimeError("out of memory")
        return loss(*arguments)

    def plant(at: int) -> None:
        nonlocal num_left
        num_left = at

    monkeypatch.setitem(LOSSES, "vanilla", failing)
    return plant


def test_a_failure_after_the_first_update_raises_partial_step(
    tiny_folder: Path, fail_at: Plant
) -> None:
    trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
    before = weights(trainer)

    fail_at(1)
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        train(trainer, CALLS, ppo_epochs=2, micro_batch_tokens=100_000)
    assert torch.equal(weights(trainer), before)

    fail_at(2)
    with pytest.raises(PartialStep, match=r"after an update .* RuntimeError: out of memory"):
        train(trainer, CALLS, ppo_epochs=2, micro_batch_tokens=100_000)
    assert not torch.equal(weights(trainer), before)


def test_a_failing_update_raises_partial_step(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))

    def step() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(trainer.optimizer, "step", step)
    with pytest.raises(PartialStep):
        train(trainer, CALLS)


@asynccontextmanager
async def served(folder: Path, model: Path) -> AsyncGenerator[ChildEngine]:
    """Serve a trainer's control routes in this process, and yield the server's client of it."""
    trainer = StandaloneTrainer(model, seed=0, device="cpu", dtype="auto", torch_threads=1)
    socket = folder / "s"
    config = uvicorn.Config(
        create_app(None, trainer, PreparationThreads()),
        uds=str(socket),
        log_level="warning",
        lifespan="off",
        ws="none",
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    engine = ChildEngine(EngineSpec("embedded", folder, str(model), "m", train_only=True))
    engine._http = aiohttp.ClientSession(URL, connector=aiohttp.UnixConnector(str(socket)))
    try:
        await engine.boot(JOB)
        yield engine
    finally:
        await engine.close()
        server.should_exit = True
        await serving


async def test_the_server_learns_whether_a_failed_step_can_be_retried(
    tmp_path: Path, tiny_folder: Path, fail_at: Plant
) -> None:
    async with served(tmp_path, tiny_folder) as engine:
        fail_at(1)
        with pytest.raises(ActionFailed, match="step: RuntimeError: out of memory"):
            await engine.step(Batch(1, CALLS), SPEC)

        fail_at(2)
        with pytest.raises(BackendError, match="step: PartialStep: ") as failed:
            await engine.step(Batch(1, CALLS), SPEC)
        assert not isinstance(failed.value, ActionFailed)
