"""Two real verl workers send their weights to a real vLLM. Transfers fail in the middle.

The tests share the workers and vLLM. A test may leave any weights behind.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from contract.trainers import Subject, running
from swarm_server.backends.verl.reference import on_policy_calls
from swarm_server.backends.vllm.transfer_relay import Disturb, corrupt, refuse
from swarm_server.backends.vllm.transfer_setup import TransferSetup

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.types.engine_spec import EngineSpec

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.asyncio(loop_scope="module"),
]
CALLS = on_policy_calls()


@dataclass(frozen=True, slots=True)
class Pair:
    """A vLLM, and the verl trainer that sends weights to it."""

    setup: TransferSetup
    trainer: Subject

    async def publish(self, disturb: Disturb | None = None) -> list[str]:
        return await self.setup.publish(self.trainer.engine, disturb)

    async def publish_by_folder(self, name: str) -> None:
        self.setup.version += 1
        await self.setup.vllm.load_weights(await self.trainer.export(name), self.setup.version)

    async def log_probs(self) -> list[float]:
        """Return vLLM's log-probabilities of the known prompt."""
        reply = await self.setup.vllm.probe()
        assert reply is not None
        return list(reply.log_probs)

    async def check_is_served(self) -> None:
        """Check that vLLM serves the trainer's weights."""
        assert await self.setup.difference(self.trainer.engine) < 1e-4
        assert self.setup.endpoint.gate.version == self.setup.version


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Pair]:
    run_dir = tmp_path_factory.mktemp("vllm")
    model = str(DEMO_MODEL_DIR)
    vllm = VllmRollout(EngineSpec("vllm", run_dir, model, "demo", weight_transport="vllm"))
    try:
        endpoint = await vllm.launch()
        async with running("verl", tmp_path_factory.mktemp("verl"), "--num-workers=2") as trainer:
            yield Pair(TransferSetup(run_dir, vllm, [trainer.engine], endpoint), trainer)
    finally:
        await vllm.close()


async def test_sent_weights_are_those_that_the_folder_brings(pair: Pair) -> None:
    for name in ("first", "second"):
        before = await pair.log_probs()
        await pair.trainer.step(CALLS)
        routes = await pair.publish()
        assert routes.count("update_weights") > 10
        assert routes[-1] == "finish_weight_update"
        await pair.check_is_served()
        sent = await pair.log_probs()
        assert max(abs(new - old) for new, old in zip(sent, before, strict=True)) > 1e-2
        await pair.publish_by_folder(name)
        assert await pair.log_probs() == sent


@pytest.mark.parametrize("disturb", [refuse, corrupt])
async def test_after_a_transfer_that_fails_halfway_the_folder_brings_the_weights_and_workers_go_on(
    pair: Pair, disturb: Disturb, caplog: pytest.LogCaptureFixture
) -> None:
    await pair.trainer.step(CALLS)
    routes = await pair.publish(disturb)
    assert routes[-1] == "update_weights"
    assert "failed in update_weights" in caplog.text
    assert "it loads them from a folder" in caplog.text
    await pair.check_is_served()
    assert await pair.trainer.engine.health() and await pair.setup.vllm.health()
    # No worker still waits for another one.
    await pair.trainer.step(CALLS)
    caplog.clear()
    await pair.publish()
    assert caplog.text == ""
    await pair.check_is_served()
