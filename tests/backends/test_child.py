"""The fake engine as a child process: its socket, its end, and what is told of it."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from fakevllm_adapters.swarm import TrainJob
from fakevllm_server.backends import process
from fakevllm_server.backends.base import ActionFailed, BackendError, BackendRefused
from fakevllm_server.backends.child import ChildEngine
from fakevllm_server.backends.spec import EngineSpec


def spec(folder: Path, *arguments: str) -> EngineSpec:
    return EngineSpec("fake", folder, None, "fake", extra_args=arguments)


async def test_the_socket_is_its_owners_alone_and_gone_after_the_close(tmp_path: Path) -> None:
    backend = ChildEngine(spec(tmp_path))
    endpoint = await backend.launch()
    assert endpoint.socket is not None
    assert endpoint.socket.stat().st_mode & 0o777 == 0o600
    await backend.close()
    assert not endpoint.socket.exists()


async def test_a_folder_made_for_a_long_path_goes_with_the_engine(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    backend = ChildEngine(spec(folder))
    endpoint = await backend.launch()
    assert endpoint.socket is not None and endpoint.socket.parent != folder
    await backend.close()
    assert not endpoint.socket.parent.exists()


async def test_a_crash_is_told_without_the_log_and_a_lost_engine_does_not_answer(
    tmp_path: Path,
) -> None:
    backend = ChildEngine(spec(tmp_path))
    endpoint = await backend.launch()
    connector = aiohttp.UnixConnector(str(endpoint.socket))
    body = {"model": "fake", "messages": [{"role": "user", "content": "[[crash]]"}]}
    async with aiohttp.ClientSession("http://engine", connector=connector) as app:
        with pytest.raises(aiohttp.ClientError):
            await app.post("/v1/chat/completions", json=body)
    (tmp_path / "engine.log").write_text("Traceback: secret")
    assert await backend.lost() == "the fake engine exited with code 70; see engine.log"
    with pytest.raises(BackendError) as lost:
        await backend.publish(1)
    assert not isinstance(lost.value, ActionFailed)
    await backend.close()


async def test_a_refusal_is_told_with_its_last_line(tmp_path: Path) -> None:
    backend = ChildEngine(spec(tmp_path, "--no-such-flag"))
    with pytest.raises(BackendRefused, match=r"exited with code 2: .*--no-such-flag$"):
        await backend.launch()
    await backend.close()


async def test_an_action_the_engine_refuses_is_told_apart_from_a_lost_engine(
    tmp_path: Path,
) -> None:
    backend = ChildEngine(spec(tmp_path))
    await backend.launch()
    await backend.boot(TrainJob())
    with pytest.raises(ActionFailed, match="restore: FileNotFoundError"):
        await backend.restore(tmp_path / "nowhere")
    assert await backend.health()
    await backend.close()


async def test_an_engine_that_is_never_ready_is_a_backends_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "BOOT_TIMEOUT_S", 0)
    backend = ChildEngine(spec(tmp_path))
    with pytest.raises(BackendError, match="was not ready after 0 s"):
        await backend.launch()
    await backend.close()
