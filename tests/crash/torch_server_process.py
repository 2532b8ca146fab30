"""One process of a server that trains a tiny model with torch, always on the same groups.

CRASH_AT=train.updated:3 python -m crash.torch_server_process RUN_DIR MODEL_DIR
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from crash.client import Client
from crash.server_process import LocalSwarm
from swarm_server.backends.embedded.tiny_llama import save_tiny_llama

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import SiblingRef
from fakevllm_server.backends.embedded.train.standalone_trainer import StandaloneTrainer
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.journal import reads
from fakevllm_server.training import loop
from fakevllm_server.types.backend import BackendStart, Endpoint
from fakevllm_server.types.calls import RecordedCall, VersionSpan
from fakevllm_server.web import server_state

VOCABULARY = 512
NUM_GROUPS = 7
JOB = TrainJob(
    num_repeat=2,
    batch_size=1,
    lr=1e-2,
    ppo_epochs=2,
    weight_decay=0.01,
    save_freq=2,
    max_staleness=100,
    max_mismatch_k3=None,
)


class TorchTrainer(StandaloneTrainer):
    """A trainer that runs in the server's own process."""

    def __init__(self, model: Path) -> None:
        super().__init__(model, seed=0, device="cpu", dtype="float32", torch_threads=1)

    async def launch(self) -> object:
        return None

    async def health(self) -> bool:
        return True

    async def lost(self) -> str:
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().close()


class TorchBackend:
    """A backend that trains but does not sample."""

    rollout = None

    def __init__(self, model: Path) -> None:
        self.trainer = TorchTrainer(model)
        self._is_new = True

    async def start(self) -> BackendStart:
        is_new, self._is_new = self._is_new, False
        return BackendStart(Endpoint(None, "http://engine", "tiny", 64), trainer_is_new=is_new)

    async def is_sampling(self) -> bool:
        return True

    @asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        yield

    async def publish(self, version: int) -> None:
        pass

    async def probe(self) -> None:
        return None

    async def close_rollout(self) -> None:
        raise AssertionError("an engine that cannot be probed is not stopped")

    async def lost(self) -> str:
        return await self.trainer.lost()

    async def close(self) -> None:
        await self.trainer.close()


class FixedClient(Client):
    """A client whose calls depend only on the group's name, so that repeated calls are equal."""

    def _new_call(self, owner: str) -> RecordedCall:
        rng = random.Random(owner)
        prompt = [rng.randrange(7, VOCABULARY) for _ in range(6)]
        response = [rng.randrange(7, VOCABULARY) for _ in range(8)]
        version = self._swarm.engine.version
        spans = [VersionSpan(version, 0, len(response))]
        logprobs = [-6 + rng.random() for _ in response]
        return RecordedCall(prompt, response, logprobs, spans, 1.0, "stop", None)

    async def call(self, sibling: SiblingRef) -> None:
        # The call may be captured although its acknowledgement was lost. Do not capture it twice.
        await self._swarm.journal.flush()
        key = sibling.group_id, sibling.index + 1
        if not self._swarm.journal.read(reads.calls_by_sibling, *key)[-1]:
            await super().call(sibling)


def make_model(folder: Path) -> None:
    save_tiny_llama(
        folder,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )


async def run_server(run_dir: Path) -> None:
    server = LocalSwarm(ServerConfig("fake", run_dir))
    client = FixedClient(server, run_dir)
    await server.resume()
    await client.start("only", JOB)
    for number in range(NUM_GROUPS):
        await client.group(f"g{number}", 1.0, 0.0)
    await client.stop("only")  # saves a checkpoint, because the number of steps is odd
    await server.close()


def main(run_dir: Path, model: str, only_make_model: bool = False) -> None:
    """Run the server and its client, or only make the model in the folder `model`."""
    if only_make_model:
        return make_model(Path(model))

    def open_backend(*_: object) -> TorchBackend:
        return TorchBackend(Path(model))

    server_state.open_backend = open_backend
    loop.SWEEP_EVERY_S = 0.01
    asyncio.run(run_server(run_dir))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
