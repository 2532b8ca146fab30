"""`fakevllm-server curves` on a run directory that is in use says why it writes nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest_asyncio
from typer.testing import CliRunner

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.cli.main import app
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.web.server_state import ServerState


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncGenerator[ServerState]:
    """A server that has started the runs `a` and `b`, and whose current run is `b`."""
    state = ServerState(ServerConfig("fake", tmp_path))
    for name in ("a", "b"):
        state.job = TrainJob(experiment_name=name)
        async with state.engine_lock:
            await state.start_engine()
        await state.stop_engine()
    yield state
    await state.close()


def message(run_dir: Path) -> str:
    result = CliRunner().invoke(app, ["curves", "--run-dir", str(run_dir)])
    assert result.exit_code == 2
    return result.output


async def test_the_curves_of_the_run_at_the_top_are_not_those_that_the_server_writes(
    server: ServerState, tmp_path: Path
) -> None:
    named = message(tmp_path)
    assert f"writes the curves of its current run, {tmp_path / 'runs/b'}" in named
    assert "tensorboard" not in named and "stop the server first" in named


async def test_the_server_writes_the_curves_of_its_current_run_itself(
    server: ServerState, tmp_path: Path
) -> None:
    text = " ".join(message(tmp_path / "runs/b").split())
    assert "a running server writes the curves itself if the package `tensorboard` is" in text


async def test_the_server_writes_the_curves_of_the_run_at_the_top_if_it_is_current(
    server: ServerState, tmp_path: Path
) -> None:
    server.job = TrainJob(experiment_name="a")
    async with server.engine_lock:
        await server.start_engine()
    assert "a running server writes the curves itself" in message(tmp_path)
