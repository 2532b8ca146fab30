"""Real vLLM gets weights that the embedded trainer sends, without a folder. Transfers fail in the
middle. vLLM falls asleep and wakes up.

The tests share one vLLM, because a start takes half a minute. A test may leave any weights behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from swarm_server.backends.vllm.greedy import save_perturbed_model
from swarm_server.backends.vllm.processes import api_process
from swarm_server.backends.vllm.transfer_relay import Disturb, corrupt, refuse
from swarm_server.backends.vllm.transfer_setup import TransferSetup

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.embedded.train.standalone_trainer import StandaloneTrainer
from fakevllm_server.backends.vllm import rollout as rollout_module
from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.types.backend import BackendError, Endpoint
from fakevllm_server.types.engine_spec import EngineSpec

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[TransferSetup]:
    run_dir = tmp_path_factory.mktemp("run")
    folders = [save_perturbed_model(tmp_path_factory.mktemp("model"), seed) for seed in (1, 2)]
    trainers = [
        StandaloneTrainer(folder, seed=0, device="cpu", dtype="float32", torch_threads=1)
        for folder in folders
    ]
    model = str(DEMO_MODEL_DIR)
    vllm = VllmRollout(EngineSpec("vllm", run_dir, model, "demo", weight_transport="vllm"))
    setup = TransferSetup(run_dir, vllm, trainers, await vllm.launch())
    yield setup
    await vllm.close()


@asynccontextmanager
async def app(endpoint: Endpoint) -> AsyncGenerator[aiohttp.ClientSession]:
    connector = aiohttp.UnixConnector(str(endpoint.socket), limit=0, force_close=True)
    async with aiohttp.ClientSession(endpoint.url, connector=connector) as session:
        yield session


async def ask(
    session: aiohttp.ClientSession, endpoint: Endpoint, num_tokens: int = 24
) -> list[int]:
    """Request an answer through the gate. Return the versions that may have sampled it."""
    request: dict[str, Any] = {
        "messages": [{"role": "user", "content": "What is 2 plus 3?"}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with endpoint.gate.call() as stamp:
        async with session.post("/v1/chat/completions", json=request) as response:
            body = await response.json()
            assert response.status == 200, body
        return list(stamp.versions)


async def test_sent_weights_are_those_of_the_trainer(setup: TransferSetup) -> None:
    await setup.up()
    for trainer in (*setup.trainers, setup.trainers[0]):
        routes = await setup.publish(trainer)
        assert routes[:2] == ["init_weight_transfer_engine", "start_weight_update"]
        assert routes.count("update_weights") > 10
        assert routes[-1] == "finish_weight_update"
        assert await setup.difference(trainer) < 1e-4
        assert setup.endpoint.gate.version == setup.version
    assert await setup.difference(setup.trainers[1]) > 0.05


@pytest.mark.parametrize("disturb", [refuse, corrupt])
async def test_after_a_transfer_that_fails_halfway_the_folder_brings_the_same_weights(
    setup: TransferSetup,
    disturb: Disturb,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rollout_module, "DRAIN_BOUND_S", 0.0)
    await setup.up()
    old, new = setup.trainers
    await setup.publish(old)
    before, endpoint = setup.version, setup.endpoint
    waiting: list[asyncio.Task[list[int]]] = []

    async def disturb_and_call(body: bytes) -> bytes | None:
        waiting.append(asyncio.create_task(ask(session, endpoint)))
        return await disturb(body)

    async with app(endpoint) as session:
        running = [asyncio.create_task(ask(session, endpoint, 450)) for _ in range(3)]
        while endpoint.gate.num_running < len(running):
            await asyncio.sleep(0)
        routes = await setup.publish(new, disturb_and_call)
        assert routes[-1] == "update_weights"
        assert "it loads them from a folder" in caplog.text
        after = setup.version
        versions = await asyncio.gather(*running)
        assert [before, after] in versions  # a call may have ended before the pause
        assert all(one in ([before], [before, after]) for one in versions)
        assert await asyncio.gather(*waiting) == [[after]]
        assert await ask(session, endpoint) == [after]
    assert await setup.difference(new) < 1e-4
    assert endpoint is setup.endpoint and await setup.vllm.health()
    # The next transfer succeeds.
    await setup.publish(old)
    assert await setup.difference(old) < 1e-4


async def test_a_vllm_that_is_killed_during_a_transfer_is_lost_and_the_next_one_gets_the_weights(
    setup: TransferSetup,
) -> None:
    await setup.up()

    async def kill(body: bytes) -> bytes | None:
        assert setup.endpoint.socket is not None
        os.kill(api_process(setup.endpoint.socket).pid, signal.SIGKILL)
        return body

    with pytest.raises(BackendError, match="was ended"):
        await setup.publish(setup.trainers[0], kill)
    assert not await setup.vllm.health()
    await setup.up()
    await setup.publish(setup.trainers[0])
    assert await setup.difference(setup.trainers[0]) < 1e-4


async def test_calls_wait_while_vllm_sleeps_and_are_answered_by_the_new_weights(
    setup: TransferSetup,
) -> None:
    await setup.up()
    old, new = setup.trainers
    await setup.publish(old)
    async with app(setup.endpoint) as session:
        await setup.vllm.sleep()
        waiting = asyncio.create_task(ask(session, setup.endpoint))
        await setup.publish(new)
        assert await waiting == [setup.version]
        assert await setup.difference(new) < 1e-4
        await setup.vllm.sleep()
        waiting = asyncio.create_task(ask(session, setup.endpoint))
        await setup.vllm.wake_up()
        assert await waiting == [setup.version]
    assert await setup.difference(new) < 1e-4
