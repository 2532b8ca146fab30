"""Start, stop and close of the server's state, with the fake engine as a child process."""

import asyncio
from pathlib import Path

from typer.testing import CliRunner

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.cli.main import app
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.run.folder import RunFolder
from fakevllm_server.web.server_state import ServerState


async def start_engine(state: ServerState) -> None:
    async with state.engine_lock:
        await state.start_engine()


async def wait_until_rolling(state: ServerState) -> None:
    async with asyncio.timeout(20):
        while state.engine.status is not EngineStatus.ROLLING:
            await asyncio.sleep(0.02)


async def test_a_start_during_a_stop_waits_for_the_stop_and_keeps_its_socket(
    tmp_path: Path,
) -> None:
    state = ServerState(ServerConfig("fake", tmp_path))
    state.job = TrainJob()
    await start_engine(state)
    await wait_until_rolling(state)
    await asyncio.gather(state.stop_engine(), state.stop_engine(), start_engine(state))
    await wait_until_rolling(state)
    assert list(tmp_path.glob("engine-*.sock"))
    await state.close()
    assert not list(tmp_path.glob("engine-*.sock"))


async def test_a_closed_server_releases_its_run_directory(tmp_path: Path) -> None:
    await ServerState(ServerConfig("fake", tmp_path)).close()
    RunFolder(tmp_path).close()


def test_a_second_server_on_a_run_directory_is_refused(tmp_path: Path) -> None:
    first = RunFolder(tmp_path)
    arguments = ["start", "--backend", "fake", "--port", "0", "--run-dir", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    first.close()
    assert result.exit_code == 2
    assert "is used by another server: choose another --run-dir" in result.output
