"""Fixtures: an intake that can crash and restart, and a run with checkpoints."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from swarm_server.cli.saved_runs import GROUPS, running_server
from swarm_server.training.intake_server import IntakeServer

from fakevllm_server.journal import group_commit_writer


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[IntakeServer]:
    """An intake that can be killed and restarted, and whose journal retries quickly."""
    monkeypatch.setattr(group_commit_writer, "RETRY_S", 0.01)
    server = IntakeServer(tmp_path / "run")
    yield server
    server.process.close()


@pytest.fixture(scope="module")
def five_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2, 4 and 5, of which step 2 has the highest mean reward."""
    run_dir = tmp_path_factory.mktemp("run") / "run"

    async def train() -> None:
        async with running_server(run_dir) as server:
            for name in GROUPS:
                await server.train(name, *((1.0, 0.5) if name in "ab" else (1.0, 0.0)))

    asyncio.run(train())
    return run_dir


@pytest.fixture
def run_dir(five_steps: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(five_steps, tmp_path / "run"))
