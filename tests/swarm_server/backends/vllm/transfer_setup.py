"""A real vLLM, and trainers that send their weights to it through a relay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swarm_server.backends.vllm.transfer_relay import Disturb, TransferRelay

from fakevllm_server.backends.embedded.train.standalone_trainer import StandaloneTrainer
from fakevllm_server.backends.process.child_engine import ChildEngine
from fakevllm_server.backends.process.weight_transports import WeightsFolder
from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.training.weight_probe import compare
from fakevllm_server.types.backend import Call, Endpoint
from fakevllm_server.types.known_prompt import PROBE_ID
from fakevllm_server.types.weight_transfer import TransferTarget

MAX_CHUNK_BYTES = 200_000
"""The demo's model has 2.6 MB, so a transfer has more than ten chunks."""

AnyTrainer = StandaloneTrainer | ChildEngine


@dataclass(slots=True)
class TransferSetup:
    """One vLLM, and the trainers that send weights to it."""

    run_dir: Path
    vllm: VllmRollout
    trainers: Sequence[AnyTrainer]
    endpoint: Endpoint
    version: int = 0

    async def up(self) -> None:
        if not await self.vllm.health():
            self.endpoint = await self.vllm.launch()

    async def publish(self, trainer: AnyTrainer, disturb: Disturb | None = None) -> list[str]:
        """Let a trainer send its weights through a relay. Return the requested routes."""
        self.version += 1
        folder = WeightsFolder(self.run_dir / "weights", trainer)  # type: ignore[arg-type]
        assert self.endpoint.socket is not None
        relay = TransferRelay(self.endpoint.socket, disturb)
        path = self.run_dir / f"relay-{self.version}.sock"

        async def send(target: TransferTarget) -> None:
            assert target.socket == str(self.endpoint.socket)
            async with relay.serving(path):
                await trainer.send_weights(
                    replace(target, socket=str(path), max_chunk_bytes=MAX_CHUNK_BYTES)
                )

        await self.vllm.receive_weights(send, folder.exported, self.version)
        return relay.routes

    async def difference(self, trainer: AnyTrainer) -> float:
        """Return how far vLLM's log-probabilities of the known prompt are from a trainer's."""
        reply = await self.vllm.probe()
        assert reply is not None
        ids, logprobs = reply.ids, [0.0] * (len(reply.ids) - 1)
        call = Call(PROBE_ID, ids[:1], ids[1:], logprobs, 0, 1.0, advantage=0.0, weight=1.0)
        (expected,) = await trainer.log_probs([call], "trained")
        result = compare(reply, expected)
        assert result is not None
        return result.difference
