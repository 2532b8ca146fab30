"""The server's state as a whole, with the fake engine as its child."""

import asyncio
from pathlib import Path

from typer.testing import CliRunner

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.cli.main import app
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.run.folder import RunFolder
from fakevllm_server.web.state import ServerState


async def started(state: ServerState) -> None:
    async with state.engine_lock:
        await state.start_engine()


async def rolling(state: ServerState) -> None:
    async with asyncio.timeout(20):
        while state.engine.status is not EngineStatus.ROLLING:
            await asyncio.sleep(0.02)


async def test_a_start_during_a_stop_waits_for_it_and_keeps_its_socket(tmp_path: Path) -> None:
    state = ServerState(ServerConfig("fake", tmp_path))
    state.job = TrainJob()
    await started(state)
    await rolling(state)
    await asyncio.gather(state.stop_engine(), state.stop_engine(), started(state))
    await rolling(state)
    assert list(tmp_path.glob("engine-*.sock"))
    await state.close()
    assert not list(tmp_path.glob("engine-*.sock"))


async def test_a_closed_server_leaves_its_run_directory_to_the_next(tmp_path: Path) -> None:
    await ServerState(ServerConfig("fake", tmp_path)).close()
    RunFolder(tmp_path).close()


def test_a_second_server_on_a_run_directory_leaves_with_a_word_to_the_user(tmp_path: Path) -> None:
    first = RunFolder(tmp_path)
    arguments = ["start", "--backend", "fake", "--port", "0", "--run-dir", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    first.close()
    assert result.exit_code == 2
    assert "is used by another server: choose another --run-dir" in result.output
