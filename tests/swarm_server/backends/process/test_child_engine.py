"""The fake engine as a child process: its socket, its exit, and the messages about it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from contract.trainers import Subject, process_of

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.process import child_engine, child_process
from fakevllm_server.backends.process.child_engine import ChildEngine
from fakevllm_server.types.backend import ActionFailed, BackendError, BackendRefused
from fakevllm_server.types.engine_spec import EngineSpec


def spec(folder: Path, *arguments: str) -> EngineSpec:
    return EngineSpec("fake", folder, None, "fake", extra_args=arguments)


async def test_only_the_owner_may_open_the_socket_and_close_removes_it(tmp_path: Path) -> None:
    backend = ChildEngine(spec(tmp_path))
    endpoint = await backend.launch()
    assert endpoint.socket is not None
    assert endpoint.socket.stat().st_mode & 0o777 == 0o600
    await backend.close()
    assert not endpoint.socket.exists()


async def test_the_process_sees_only_the_gpus_of_its_engine(tmp_path: Path) -> None:
    backend = ChildEngine(replace(spec(tmp_path), visible_gpus="2,3"))
    await backend.launch()
    process = process_of(Subject("fake", backend, tmp_path))
    environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=2,3" in environment
    await backend.close()


async def test_a_leftover_engine_and_its_successor_have_different_sockets(tmp_path: Path) -> None:
    leftover, successor = ChildEngine(spec(tmp_path)), ChildEngine(spec(tmp_path))
    before, after = await leftover.launch(), await successor.launch()
    assert before.socket is not None and after.socket is not None
    assert before.socket != after.socket
    assert not before.socket.exists() and after.socket.exists()
    await leftover.close()
    assert await successor.health()
    await successor.close()


async def test_the_temporary_folder_for_a_long_path_is_removed_with_the_engine(
    tmp_path: Path,
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    backend = ChildEngine(spec(folder))
    endpoint = await backend.launch()
    assert endpoint.socket is not None and endpoint.socket.parent != folder
    await backend.close()
    assert not endpoint.socket.parent.exists()


async def test_a_crash_is_reported_without_log_lines_and_the_engine_refuses_actions(
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
    exited = f"exited with code 70; see {tmp_path}/engine.log"
    assert await backend.lost() == f"the fake engine {exited}"
    with pytest.raises(BackendError) as lost:
        await backend.publish(1)
    assert not isinstance(lost.value, ActionFailed)
    assert str(lost.value) == f"the fake engine did not answer publish: it {exited}"
    await backend.close()


async def test_a_refusal_is_reported_with_the_last_line_of_the_log(tmp_path: Path) -> None:
    backend = ChildEngine(spec(tmp_path, "--no-such-flag"))
    with pytest.raises(BackendRefused, match=r"exited with code 2: .*--no-such-flag$"):
        await backend.launch()
    await backend.close()


async def test_a_failed_action_is_distinguished_from_a_lost_engine(
    tmp_path: Path,
) -> None:
    backend = ChildEngine(spec(tmp_path))
    await backend.launch()
    await backend.boot(TrainJob())
    with pytest.raises(ActionFailed, match="restore: FileNotFoundError"):
        await backend.restore(tmp_path / "nowhere")
    assert await backend.health()
    await backend.close()


async def test_an_engine_that_is_never_ready_is_a_backend_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "BOOT_TIMEOUT_S", 0)
    backend = ChildEngine(spec(tmp_path))
    with pytest.raises(BackendError, match=r"was not ready after 0 s; see /.*/engine\.log$"):
        await backend.launch()
    await backend.close()


@pytest.fixture
async def suspended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[tuple[ChildEngine, Path]]:
    """An engine whose process is suspended, with its socket."""
    monkeypatch.setattr(child_engine, "HEALTH_TIMEOUT_S", 0.05)
    monkeypatch.setattr(child_engine, "HEALTH_INTERVAL_S", 0.01)
    monkeypatch.setattr(child_engine, "HUNG_AFTER_S", 0.2)
    monkeypatch.setattr(child_engine, "HUNG_GRACE_S", 0.2)
    backend = ChildEngine(spec(tmp_path))
    endpoint = await backend.launch()
    assert endpoint.socket is not None
    os.kill(process_of(Subject("fake", backend, tmp_path)), signal.SIGSTOP)
    yield backend, endpoint.socket
    await backend.close()


async def test_an_engine_that_hangs_is_stopped_and_its_running_action_fails(
    suspended: tuple[ChildEngine, Path], tmp_path: Path
) -> None:
    backend, _ = suspended
    saving = asyncio.create_task(backend.save(tmp_path / "saved"))

    message = await backend.lost()

    assert message == "the fake engine has not answered /health for 0.2 s and was ended"
    with pytest.raises(BackendError) as failed:
        await saving
    assert not isinstance(failed.value, ActionFailed)
    with pytest.raises(AssertionError, match="no process runs"):
        process_of(Subject("fake", backend, tmp_path))
    await backend.launch()
    assert await backend.health()


async def test_an_action_that_times_out_fails_without_a_wait_for_an_exit(
    suspended: tuple[ChildEngine, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, socket = suspended
    monkeypatch.setattr(child_engine, "EXIT_WAIT_S", 600.0)
    assert backend._http is not None
    await backend._http.close()
    backend._http = aiohttp.ClientSession(
        child_engine.URL,
        connector=aiohttp.UnixConnector(str(socket)),
        timeout=aiohttp.ClientTimeout(total=0.05),
    )
    async with asyncio.timeout(20):
        with pytest.raises(BackendError, match=r"did not answer save: .*Timeout"):
            await backend.save(tmp_path / "saved")


async def test_an_engine_that_hangs_is_stopped_also_if_the_watch_is_cancelled(
    suspended: tuple[ChildEngine, Path], tmp_path: Path
) -> None:
    backend, socket = suspended
    watching = asyncio.create_task(backend.lost())
    while backend._http is not None:  # the first resource that is closed
        await asyncio.sleep(0.01)
    assert socket.exists()
    watching.cancel()

    await backend.close()

    assert not socket.exists()
    with pytest.raises(AssertionError, match="no process runs"):
        process_of(Subject("fake", backend, tmp_path))


async def test_an_engine_that_passes_some_health_checks_keeps_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ChildEngine(spec(tmp_path))
    await backend.launch()
    answers = iter([False, False, True] * 3)
    all_used = asyncio.Event()

    async def health() -> bool:
        answer = next(answers, None)
        if answer is None:
            all_used.set()
        return answer is not False

    monkeypatch.setattr(child_engine, "HEALTH_INTERVAL_S", 0.0)
    monkeypatch.setattr(child_engine, "HUNG_AFTER_S", 0.0)
    monkeypatch.setattr(backend, "health", health)
    watching = asyncio.create_task(backend.lost())
    await all_used.wait()

    assert not watching.done()
    watching.cancel()
    await backend.close()
