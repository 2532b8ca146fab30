"""The processes of several versions of the hooks."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.hook_versions import HookVersions
from fakevllm.hooks.version_leases import Use
from tests.proxy.hooks.hook_calls import reward

PID = """
import os
def on_compute_relative_reward(v, a, q):
    return [os.getpid()]
"""


async def started(folder: Path, text: str) -> HookWorker:
    (folder / "hook.py").write_text(text)
    worker = HookWorker(folder, 20.0)
    await worker.start()
    return worker


async def process_id(worker: HookWorker) -> int:
    (pid,) = (await reward(worker, "a")).rewards or []
    assert pid is not None
    return int(pid)


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() if os.path.isdir("/proc") else _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until_ended(pid: int) -> None:
    async with asyncio.timeout(20):
        while is_running(pid):
            await asyncio.sleep(0.02)


async def test_an_old_process_stays_until_its_groups_are_done_and_then_ends(tmp_path: Path) -> None:
    old = await started(tmp_path, PID)
    versions = HookVersions(old)
    try:
        assert versions.begin("g1", Use.REQUEST) is old
        new = await started(tmp_path, PID + "# edited\n")
        versions.take_over(new, now=5.0)
        assert versions.current is new and versions.since == 5.0
        assert versions.of_group("g1") is old and versions.of_group("g2") is new
        with versions.using("g2", Use.CALL) as worker:
            new_pid = await process_id(worker)
        old_pid = await process_id(versions.of_group("g1"))
        assert old_pid != new_pid
        versions.end("g1", Use.REQUEST)
        assert versions.num_open == 1
        await until_ended(old_pid)
        assert is_running(new_pid)
    finally:
        await versions.close()
    assert not is_running(new_pid)


async def test_all_processes_end_when_the_versions_are_closed(tmp_path: Path) -> None:
    versions = HookVersions(await started(tmp_path, PID))
    pids = [await process_id(versions.begin("g1", Use.SIBLINGS))]
    versions.take_over(await started(tmp_path, PID + "# edited\n"), now=0.0)
    pids.append(await process_id(versions.current))
    await versions.close()
    assert not any(map(is_running, pids))


async def test_a_process_that_cannot_be_closed_does_not_keep_the_others_running(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(HookWorker):
        async def close(self) -> None:
            await super().close()
            raise OSError("broken")

    (tmp_path / "hook.py").write_text(PID)
    broken = Broken(tmp_path, 20.0)
    await broken.start()
    versions = HookVersions(broken)
    versions.begin("g1", Use.REQUEST)
    new = await started(tmp_path, PID + "# edited\n")
    pid = await process_id(new)
    versions.take_over(new, now=5.0)
    await versions.close()
    await until_ended(pid)
    assert "could not be closed (broken)" in caplog.text
