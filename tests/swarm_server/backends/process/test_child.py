"""The fake engine as a child process: its socket, its end, and what is told of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest
from contract.trainers import Subject, process_of

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.process import child, process
from fakevllm_server.backends.process.child import ChildEngine
from fakevllm_server.types.backend import ActionFailed, BackendError, BackendRefused
from fakevllm_server.types.engine_spec import EngineSpec


def spec(folder: Path, *arguments: str) -> EngineSpec:
    return EngineSpec("fake", folder, None, "fake", extra_args=arguments)


async def test_the_socket_is_its_owners_alone_and_gone_after_the_close(tmp_path: Path) -> None:
    backend = ChildEngine(spec(tmp_path))
    endpoint = await backend.launch()
    assert endpoint.socket is not None
    assert endpoint.socket.stat().st_mode & 0o777 == 0o600
    await backend.close()
    assert not endpoint.socket.exists()


async def test_an_engine_of_an_earlier_life_is_never_where_its_successor_is(tmp_path: Path) -> None:
    left, successor = ChildEngine(spec(tmp_path)), ChildEngine(spec(tmp_path))
    before, after = await left.launch(), await successor.launch()
    assert before.socket is not None and after.socket is not None
    assert before.socket != after.socket
    assert not before.socket.exists() and after.socket.exists()
    await left.close()
    assert await successor.health()
    await successor.close()


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


@pytest.fixture
async def stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[tuple[ChildEngine, Path]]:
    """An engine that does not move, with its socket."""
    monkeypatch.setattr(child, "HEALTH_TIMEOUT_S", 0.05)
    monkeypatch.setattr(child, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(child, "HUNG_AFTER_S", 0.2)
    monkeypatch.setattr(child, "HUNG_GRACE_S", 0.2)
    backend = ChildEngine(spec(tmp_path))
    endpoint = await backend.launch()
    assert endpoint.socket is not None
    os.kill(process_of(Subject("fake", backend, tmp_path)), signal.SIGSTOP)
    yield backend, endpoint.socket
    await backend.close()


async def test_an_engine_that_hangs_is_ended_with_what_was_asked_of_it(
    stopped: tuple[ChildEngine, Path], tmp_path: Path
) -> None:
    backend, _ = stopped
    saving = asyncio.create_task(backend.save(tmp_path / "saved"))

    told = await backend.lost()

    assert told == "the fake engine has not answered /health for 0.2 s and was ended"
    with pytest.raises(BackendError) as failed:
        await saving
    assert not isinstance(failed.value, ActionFailed)
    with pytest.raises(AssertionError, match="no process runs"):
        process_of(Subject("fake", backend, tmp_path))
    await backend.launch()
    assert await backend.health()


async def test_an_engine_that_hangs_is_ended_though_nobody_waits_any_longer(
    stopped: tuple[ChildEngine, Path], tmp_path: Path
) -> None:
    backend, socket = stopped
    watching = asyncio.create_task(backend.lost())
    while backend._http is not None:  # the first thing to go
        await asyncio.sleep(0.01)
    assert socket.exists()
    watching.cancel()

    await backend.close()

    assert not socket.exists()
    with pytest.raises(AssertionError, match="no process runs"):
        process_of(Subject("fake", backend, tmp_path))


async def test_an_engine_that_answers_now_and_then_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ChildEngine(spec(tmp_path))
    await backend.launch()
    answers = iter([False, False, True] * 3)
    all_given = asyncio.Event()

    async def health() -> bool:
        answer = next(answers, None)
        if answer is None:
            all_given.set()
        return answer is not False

    monkeypatch.setattr(child, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(child, "HUNG_AFTER_S", 0.0)
    monkeypatch.setattr(backend, "health", health)
    watching = asyncio.create_task(backend.lost())
    await all_given.wait()

    assert not watching.done()
    watching.cancel()
    await backend.close()
