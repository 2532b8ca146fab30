"""A process of the server's: however its closing is cut off, nothing of it stays."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from fakevllm_server.backends.process.process import ChildProcess
from fakevllm_server.types.backend import BackendRefused

DEAF = "import signal, time; signal.signal(15, 1); print('deaf', flush=True); time.sleep(600)"


async def test_a_close_that_is_cut_off_ends_the_process_all_the_same(tmp_path: Path) -> None:
    process = ChildProcess("the engine", tmp_path / "log")
    await process.start([sys.executable, "-c", DEAF], os.environ)

    async def is_deaf() -> bool:
        return "deaf" in process.log_file.read_text()

    await process.until(is_deaf)
    lost = asyncio.create_task(process.lost())
    closing = asyncio.create_task(process.close(grace_s=60))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert "(killed" in await lost
    assert not process.is_running
    await process.close()


async def test_a_program_that_is_not_there_is_the_users_to_mend(tmp_path: Path) -> None:
    process = ChildProcess("the engine", tmp_path / "log")
    with pytest.raises(BackendRefused, match=r"the engine cannot be started: .*/nothing"):
        await process.start([str(tmp_path / "nothing")], os.environ)
