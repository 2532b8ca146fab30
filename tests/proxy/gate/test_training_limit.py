"""A proxy without a gate between steps removes the limit that an earlier one has left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import aiohttp
import pytest

from fakevllm.gate.training_limit import remove_training_limit
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply, SuccessReply
from tests.proxy.scripted_swarm import until

PAUSE_S = 0.001


@dataclass
class LimitedServer:
    """A server whose run has a limit of training."""

    training_limit: int | None = 4
    run_id: str = "run"
    num_outages: int = 0
    refusal: str = ""
    num_looks: int = 0
    requests: list[int | None] = field(default_factory=list[int | None])

    @property
    def status(self) -> EngineStatusReply:
        self.num_looks += 1
        return EngineStatusReply(
            engine_status=EngineStatus.ROLLING,
            run_id=self.run_id,
            training_limit=self.training_limit,
        )

    async def limit_training(self, version: int | None) -> SuccessReply:
        await asyncio.sleep(0)
        if self.num_outages:
            self.num_outages -= 1
            raise aiohttp.ClientConnectionError("refused")
        if self.refusal:
            return SuccessReply(success=False, failure_reason=self.refusal)
        self.requests.append(version)
        self.training_limit = version
        return SuccessReply(success=True)

    async def some_looks(self) -> None:
        until_look = self.num_looks + 5
        await until(lambda: self.num_looks >= until_look)


@contextlib.asynccontextmanager
async def removing(server: LimitedServer) -> AsyncGenerator[None]:
    task = asyncio.create_task(remove_training_limit(server, PAUSE_S))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_limit_of_each_run_is_removed_once() -> None:
    server = LimitedServer()
    async with removing(server):
        await until(lambda: server.training_limit is None)
        server.training_limit = 8  # another proxy's gate
        await server.some_looks()
        assert server.training_limit == 8
        server.run_id = "another run"
        await until(lambda: server.training_limit is None)
    assert server.requests == [None, None]


async def test_an_outage_delays_the_removal_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = LimitedServer(num_outages=3)
    async with removing(server):
        await until(lambda: server.training_limit is None)
    warnings = [line for line in caplog.messages if "training waits at version 4" in line]
    assert len(warnings) == 1


async def test_a_refusal_names_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    server = LimitedServer(refusal="the limit is about another run")
    async with removing(server):
        await server.some_looks()
    assert any("the limit is about another run; retrying" in line for line in caplog.messages)
    assert server.training_limit == 4
