"""Claims of episodes while a training step runs, with and without `async_steps`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from swarm_server.local_backend import LocalBackend
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import (
    EndGroupRequest,
    EngineStatus,
    EngineStatusReply,
    SiblingRef,
)
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.episodes.collection_limit import AHEAD, UNDER_WAY_S
from fakevllm_server.training import loop
from fakevllm_server.types.backend import Endpoint
from fakevllm_server.web import server_state
from fakevllm_server.web.app import create_app
from fakevllm_server.web.server_state import ServerState

Json = dict[str, Any]
JOB = TrainJob(num_repeat=2, batch_size=1, lr=0.1, save_freq=1)
CLAIM: Json = {"client_uuid": "me", "episode_type": "train", "discard_episode_timeout": 60}


class Server:
    """A server with an engine in this process, and its client."""

    def __init__(self, state: ServerState, http: httpx.AsyncClient, backend: LocalBackend) -> None:
        self.state, self._http, self.backend = state, http, backend

    async def start(self, async_steps: int) -> None:
        self.state.job = JOB.model_copy(update={"async_steps": async_steps})
        async with self.state.engine_lock:
            await self.state.start_engine()
        async with asyncio.timeout(30):
            while self.state.engine.status is not EngineStatus.ROLLING:
                await self.state.engine.next_move()

    async def begin_step(self) -> None:
        """Let the trainer be in the middle of a step."""
        self.backend.may_step.clear()
        await self.pool_group("first")
        await self.backend.step_begun.wait()

    async def end_step(self) -> None:
        self.backend.may_step.set()
        async with asyncio.timeout(30):
            while self.state.engine.async_step_runs or not self.state.runlog.last_step:
                await self.state.engine.next_move()

    async def pool_group(self, name: str) -> None:
        version = self.state.engine.version
        for index in range(2):
            await self.state.intake.add_call(SiblingRef(name, index), call(version))
        end = EndGroupRequest(group_id=name, rewards=[1.0, 0.0])
        assert (await self.state.intake.end_group(end, None)).pooled
        self.state.notify_loop()

    async def claim(self, **changes: Any) -> Json:
        return (await self._http.post("/claim_episode", json=CLAIM | changes)).json()

    async def end_episode(self, claimed: Json, task: str) -> None:
        """Capture a call of the episode, and end the episode."""
        episode = self.state.episodes.find(claimed["episode_uuid"])
        assert episode is not None
        await self.state.intake.add_episode_call(episode, call(self.state.engine.version))
        output = {"reward": len(task) / 10, "metadata": {"task_id": task}}
        body = {"client_uuid": "me", "episode_uuid": episode.uuid, "task_id": task}
        reply = await self._http.post("/end_episode", json=body | {"workflow_output": output})
        assert reply.json()["success"], reply.text

    async def status(self) -> EngineStatusReply:
        reply = await self._http.get("/get_engine_status")
        return EngineStatusReply.model_validate_json(reply.content)


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Server]:
    backend = LocalBackend()

    def open_backend(*_: object) -> LocalBackend:
        return backend

    async def connect(self: ServerState, endpoint: Endpoint) -> None: ...

    monkeypatch.setattr(server_state, "open_backend", open_backend)
    monkeypatch.setattr(ServerState, "connect", connect)
    monkeypatch.setattr(loop, "SWEEP_EVERY_S", 0.01)
    async with opened(tmp_path, backend) as server:
        yield server
        backend.may_step.set()


@asynccontextmanager
async def opened(folder: Path, backend: LocalBackend) -> AsyncGenerator[Server]:
    app = create_app(ServerConfig("fake", folder / "run"))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        server = Server(app.state.server, http, backend)
        yield server
        await server.state.close()


async def test_with_async_steps_episodes_are_claimed_and_ended_during_a_step(
    server: Server,
) -> None:
    await server.start(async_steps=1)
    await server.begin_step()
    claimed = [await server.claim() for _ in range(2)]
    assert all(each["success"] for each in claimed)
    await server.end_episode(claimed[0], "t")
    status = await server.status()
    assert (status.engine_status, status.async_steps) == (EngineStatus.ROLLING, 1)
    assert status.async_step_runs and not status.is_between_steps
    await server.end_step()
    assert (await server.status()).is_between_steps


async def test_without_async_steps_claims_are_refused_during_a_step(server: Server) -> None:
    await server.start(async_steps=0)
    await server.begin_step()
    refused = await server.claim()
    assert not refused["success"]
    assert refused["fail_cause"].startswith(
        "Engine not ready. Current status: [ENGINE.WEIGHT_SYNCING]."
    )
    status = await server.status()
    assert (status.async_steps, status.async_step_runs) == (0, False)


async def test_claims_are_refused_once_enough_batches_are_collected_ahead_of_the_step(
    server: Server,
) -> None:
    await server.start(async_steps=2)
    await server.begin_step()
    await server.pool_group("second")
    claimed = [await server.claim() for _ in range(2)]
    refused = await server.claim()
    assert refused["fail_cause"] == (
        f"No available episodes to claim. Try again (maybe 1 minute) later. {AHEAD}"
    )
    assert (await server.claim(episode_type="eval"))["success"], "it adds no group"
    await server.state.intake.abort_episode(claimed[0]["episode_uuid"], "me")
    assert (await server.claim())["success"]
    assert not (await server.claim())["success"]
    await server.end_step()
    assert (await server.claim())["success"], "the step has trained the first group"


async def test_an_episode_of_a_begun_task_may_begin_although_enough_is_collected(
    server: Server,
) -> None:
    await server.start(async_steps=1)
    await server.begin_step()
    for task in ("t", "tt"):
        await server.end_episode(await server.claim(), task)
    assert AHEAD in (await server.claim())["fail_cause"]
    refused = await server.claim(throttle_policy={"current_task_id": "new"})
    assert AHEAD in refused["fail_cause"]
    assert (await server.claim(throttle_policy={"current_task_id": "tt"}))["success"]


async def test_tasks_that_clients_have_given_up_do_not_keep_others_from_beginning(
    server: Server,
) -> None:
    await server.start(async_steps=1)
    await server.begin_step()
    for task in ("t", "tt"):
        await server.end_episode(await server.claim(), task)
    now = time.monotonic()
    server.state.intake.sweep(now)
    assert not server.state.may_begin_episode(now + UNDER_WAY_S / 2)
    assert server.state.may_begin_episode(now + UNDER_WAY_S + 1)
