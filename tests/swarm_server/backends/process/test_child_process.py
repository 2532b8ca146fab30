"""Start and stop of a child process."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from pathlib import Path

import pytest

from fakevllm_server.backends.process.child_process import ChildProcess
from fakevllm_server.types.backend import BackendError, BackendRefused

IGNORES_SIGTERM = (
    "import signal, time; signal.signal(15, 1); print('ignoring', flush=True); time.sleep(600)"
)


async def test_a_cancelled_close_kills_the_process(tmp_path: Path) -> None:
    process = ChildProcess("the engine", tmp_path / "log")
    await process.start([sys.executable, "-c", IGNORES_SIGTERM], os.environ)

    async def ignores_sigterm() -> bool:
        return "ignoring" in process.log_file.read_text()

    await process.wait_until_ready(ignores_sigterm)
    lost = asyncio.create_task(process.lost())
    closing = asyncio.create_task(process.close(grace_s=60))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert "(killed" in await lost
    assert not process.is_running
    await process.close()


async def test_a_missing_program_is_a_refusal(tmp_path: Path) -> None:
    process = ChildProcess("the engine", tmp_path / "log")
    with pytest.raises(BackendRefused, match=r"the engine cannot be started: .*/nothing"):
        await process.start([str(tmp_path / "nothing")], os.environ)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EMFILE, errno.ENOMEM, errno.EAGAIN])
async def test_a_shortage_of_the_system_is_no_refusal_so_that_the_start_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    async def fails(*command: str, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fails)
    process = ChildProcess("the engine", tmp_path / "log")
    with pytest.raises(BackendError, match=os.strerror(code)) as failure:
        await process.start([sys.executable], os.environ)
    assert not isinstance(failure.value, BackendRefused)


async def test_the_line_with_which_an_engine_says_why_it_exits_is_in_the_message(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "end")
    process = ChildProcess("the engine", tmp_path / "log")
    lines = "Traceback: secret\nthe engine ends: a worker is lost\na line of a library"
    script = f"open({str(tmp_path / 'end')!r}).read(); print({lines!r}, flush=True); exit(70)"
    await process.start([sys.executable, "-c", script], os.environ)
    assert await process.exit_message(within_s=0.0) is None
    await asyncio.to_thread((tmp_path / "end").write_text, "")
    message = "the engine exited with code 70: a worker is lost"
    assert await process.exit_message(within_s=20.0) == message
    await process.close()


@pytest.mark.parametrize(
    ("end", "exited"),
    [
        ("os.kill(os.getpid(), 9)", "exited with code -9 (killed: out of memory?)"),
        ("exit(2)", "exited with code 2"),
    ],
)
async def test_the_line_of_an_earlier_process_is_not_the_reason_of_a_later_exit(
    tmp_path: Path, end: str, exited: str
) -> None:
    process = ChildProcess("the engine", tmp_path / "log")
    first = "print('the engine ends: a worker is lost'); exit(70)"
    await process.start([sys.executable, "-c", first], os.environ)
    assert await process.lost() == "the engine exited with code 70: a worker is lost"
    await process.start([sys.executable, "-c", f"import os; {end}"], os.environ)
    assert await process.lost() == f"the engine {exited}; see {process.log_file}"
    await process.close()
