"""A rejection with the embedded engine restores weights and optimizer bit by bit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from swarm_server.loops import Run, without_copies
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.releases import Decision
from fakevllm_server.backends.embedded.engine import EmbeddedEngine, EngineConfig
from fakevllm_server.types.backend import BackendStart, Endpoint
from fakevllm_server.types.known_prompt import ProbeReply

JOB = TrainJob(
    num_repeat=2,
    batch_size=1,
    lr=1e-2,
    weight_decay=0.01,
    save_freq=1,
    max_staleness=100,
    max_mismatch_k3=None,
)
SEED_OF_GROUP = {"a": 7, "b": 20, "c": 40, "b again": 20}


class EngineBackend:
    """A backend whose engine runs in the test's process."""

    def __init__(self, model: Path) -> None:
        self.engine = EmbeddedEngine(EngineConfig(model, "tiny"))
        self._is_new = True

    @property
    def trainer(self) -> Any:
        return self.engine

    @property
    def rollout(self) -> Any:
        return self.engine

    async def start(self) -> BackendStart:
        is_new, self._is_new = self._is_new, False
        return BackendStart(Endpoint(None, "http://engine", "tiny", 64), trainer_is_new=is_new)

    async def is_sampling(self) -> bool:
        return True

    @asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        yield

    async def publish(self, version: int) -> None:
        await self.engine.publish(version)

    async def probe(self) -> ProbeReply:
        return await self.engine.probe()

    async def close_rollout(self) -> None:
        raise AssertionError("the engine has the trainer's weights after each publish")

    async def lost(self) -> str:
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        self.engine.close()


async def train(run: Run[EngineBackend], name: str, version: int) -> None:
    await run.rolling()
    first = SEED_OF_GROUP[name]
    siblings = [call(version, ids=(first + index, first + 2)) for index in range(2)]
    await run.capture(name, *siblings)
    assert (await run.end_group(name, 1.0, 0.0)).pooled
    await run.trained(name)


async def saved(run: Run[EngineBackend], folder: Path) -> dict[str, bytes]:
    """Save a checkpoint of the trainer's present state, and return its files."""
    await run.backend.engine.save(folder)
    return files_of(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.slow
async def test_a_rejection_restores_weights_and_optimizer_and_the_next_step_trains(
    tiny_folder: Path, tmp_path: Path
) -> None:
    run = Run(tmp_path, EngineBackend(tiny_folder), JOB)
    await train(run, "a", 0)
    released = files_of(tmp_path / "checkpoints" / "step-00000001")
    await run.decide(Decision.RELEASED, 1)
    await train(run, "b", 1)
    second = files_of(tmp_path / "checkpoints" / "step-00000002")
    await train(run, "c", 2)
    assert (await run.decide(Decision.REJECTED, 2)).success
    await run.rolling()

    assert await saved(run, tmp_path / "after the rejection") == released
    assert (run.engine.version, run.log.last_step) == (4, 1)
    await train(run, "b again", 4)
    assert await saved(run, tmp_path / "after the next step") == second != released
    history = run.releases.reply()
    await run.stop()

    again = Run(tmp_path, EngineBackend(tiny_folder), JOB)
    await again.rolling()
    assert without_copies(again.releases.reply()) == without_copies(history)
    assert history.rejected == [2, 3]
    assert await saved(again, tmp_path / "after a restart") == second
    await again.stop()
