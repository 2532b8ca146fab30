"""A stand-in for vLLM: as somebody else's server, and as a child."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer
from swarm_server.backends.vllm.rollouts import Remote

from fakevllm_server.backends.vllm import command, rollout
from fakevllm_server.backends.vllm.command import Install
from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.backends.vllm.stand_in import Fault, StandIn
from fakevllm_server.types.engine_spec import EngineSpec


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "DRAIN_BOUND_S", 0.05)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "weights.txt").write_text("trained")
    return folder


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    @asynccontextmanager
    async def serve(
        *faults: Fault, api_key: str | None = None, path: str = ""
    ) -> AsyncGenerator[tuple[VllmRollout, StandIn]]:
        engine = StandIn(tmp_path, faults=faults)
        async with TestServer(engine.app()) as server:
            url = str(server.make_url(path))
            spec = EngineSpec("vllm", tmp_path, None, "stand-in", url=url, api_key=api_key)
            vllm = VllmRollout(spec)
            try:
                yield vllm, engine
            finally:
                await vllm.close()

    return serve


@pytest.fixture
async def child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Callable[..., VllmRollout]]:
    """Starts the stand-in where vLLM would be started."""
    program = (sys.executable, "-m", "fakevllm_server.backends.vllm.stand_in")
    monkeypatch.setattr(command, "VLLM", program)
    monkeypatch.setattr(rollout, "find_install", lambda: Install("0.27.1"))
    made: list[VllmRollout] = []

    def make(*faults: str) -> VllmRollout:
        arguments = [part for fault in faults for part in ("--fault", fault)]
        spec = EngineSpec("vllm", tmp_path, str(tmp_path), "stand-in", extra_args=arguments)
        made.append(VllmRollout(spec))
        return made[-1]

    yield make
    for vllm in made:
        await vllm.close()
