"""Rollouts of a simulated vLLM: as an external server, and as a child process."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer
from swarm_server.backends.vllm.rollouts import ExternalVllm

from fakevllm_server.backends.vllm import command, rollout
from fakevllm_server.backends.vllm.command import Install
from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.backends.vllm.simulated_vllm import Fault, SimulatedVllm
from fakevllm_server.types.engine_spec import EngineSpec


@pytest.fixture
def short_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "DRAIN_BOUND_S", 0.05)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "weights.txt").write_text("trained")
    return folder


@pytest.fixture
def external_vllm(tmp_path: Path) -> ExternalVllm:
    @asynccontextmanager
    async def serve(
        *faults: Fault, api_key: str | None = None, path: str = ""
    ) -> AsyncGenerator[tuple[VllmRollout, SimulatedVllm]]:
        engine = SimulatedVllm(tmp_path, faults=faults)
        async with TestServer(engine.app()) as server:
            url = str(server.make_url(path))
            spec = EngineSpec("vllm", tmp_path, None, "simulated", url=url, api_key=api_key)
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
    """Create rollouts whose child process is the simulated vLLM."""
    program = (sys.executable, "-m", "fakevllm_server.backends.vllm.simulated_vllm")
    monkeypatch.setattr(command, "VLLM", program)
    monkeypatch.setattr(rollout, "find_install", lambda: Install("0.27.1"))
    rollouts: list[VllmRollout] = []

    def create(
        *faults: str,
        lora_rank: int = 0,
        arguments: Sequence[str] | None = None,
        transport: str = "folder",
    ) -> VllmRollout:
        if arguments is None:
            arguments = ["--enable-lora"] if lora_rank else []
        fault_arguments = [part for fault in faults for part in ("--fault", fault)]
        spec = EngineSpec(
            "vllm",
            tmp_path,
            str(tmp_path),
            "simulated",
            extra_args=[*fault_arguments, *arguments],
            lora_rank=lora_rank,
            weight_transport=transport,
        )
        rollouts.append(VllmRollout(spec))
        return rollouts[-1]

    yield create
    for vllm in rollouts:
        await vllm.close()
