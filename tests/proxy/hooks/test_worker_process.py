"""The hook process ends with the proxy's process, and prints nothing by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from multiprocessing import spawn
from pathlib import Path

import pytest

from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.loader import content_hash
from tests.proxy.hooks.hook_calls import reward, until_exists


def is_gone(pid: int) -> bool:
    """Return whether the process has ended. A zombie counts as ended, because only the machine's
    init may be left to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(20):
        while not is_gone(pid):
            await asyncio.sleep(0.01)


PROXY = """
import asyncio, sys
from pathlib import Path
from fakevllm.hooks.spec import Sibling, Task
from fakevllm.hooks.hook_runner import HookWorker

async def main():
    worker = HookWorker(Path(sys.argv[1]), 60)
    await worker.start()
    print("started", flush=True)
    outcome = await worker.reward([Sibling(0, Task(), "g/0", "stop")], [{"content": ""}], "q")
    print(outcome.annotations[0]["pid"], flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        pass
"""
PRINTING = """
import os
print("loading speaks")
def on_compute_relative_reward(v, a, q):
    print("calling speaks", flush=True)
    os.system("echo children speak")
    a[0]["pid"] = os.getpid()
    return [1]
"""


def start_proxy(tmp_path: Path) -> subprocess.Popen[str]:
    (tmp_path / "proxy.py").write_text(PROXY)
    (tmp_path / "hook.py").write_text(PRINTING)
    return subprocess.Popen(
        [sys.executable, tmp_path / "proxy.py", tmp_path / "hook.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )


async def test_the_process_dies_with_a_killed_proxy_and_prints_to_stderr(tmp_path: Path) -> None:
    with start_proxy(tmp_path) as proxy:
        assert proxy.stdout is not None and proxy.stderr is not None
        assert proxy.stdout.readline() == "started\n"
        pid = int(proxy.stdout.readline())
        proxy.send_signal(signal.SIGKILL)
        printed = proxy.stderr.read()
    await until_gone(pid)
    assert all(line in printed for line in ("loading speaks", "calling speaks", "children speak"))


@pytest.mark.parametrize("awaited", ["", "started\n"], ids=["while starting", "while running"])
async def test_ctrl_c_in_the_terminal_prints_nothing_from_the_worker(
    tmp_path: Path, awaited: str
) -> None:
    with start_proxy(tmp_path) as proxy:
        assert proxy.stdout is not None and proxy.stderr is not None
        if awaited:
            assert proxy.stdout.readline() == awaited
            pid = int(proxy.stdout.readline())
        else:
            pid = await first_child(proxy.pid)
        os.killpg(proxy.pid, signal.SIGINT)
        printed = proxy.stderr.read()
    await until_gone(pid)
    assert "Traceback" not in printed


async def first_child(parent: int) -> int:
    """Return the id of the hook process as soon as it exists. The other child is the resource
    tracker."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    async with asyncio.timeout(20):
        while True:
            for pid in children.read_text().split():
                command = Path(f"/proc/{pid}/cmdline").read_text()
                if "spawn_main" in command:
                    return int(pid)
            await asyncio.sleep(0)


async def test_large_hook_files_do_not_block_the_event_loop_while_the_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_python = tmp_path / "python"
    slow_python.write_text(f'#!/bin/sh\nsleep 3\nexec {sys.executable} "$@"\n')
    slow_python.chmod(0o755)
    monkeypatch.setattr(spawn, "_python_exe", os.fsencode(slow_python))
    (tmp_path / "hook.py").write_text(PRINTING + "# " + "x" * 300 * 1024)
    worker = HookWorker(tmp_path / "hook.py", 20.0)
    longest_s = 0.0

    async def measure() -> None:
        nonlocal longest_s
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.02)
            longest_s = max(longest_s, time.monotonic() - began)

    measuring = asyncio.create_task(measure())
    try:
        info = await worker.start()
        assert info.content_hash == content_hash(tmp_path / "hook.py")
    finally:
        measuring.cancel()
        await worker.close()
    assert longest_s < 2


async def test_close_kills_a_process_that_hangs_while_it_starts_again(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    (tmp_path / "hook.py").write_text(f"""
import os, pathlib, time
first = pathlib.Path({str(tmp_path / "first")!r})
if first.exists():
    pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))
    time.sleep(600)
def on_compute_relative_reward(v, a):
    first.touch()
    os._exit(1)
""")
    worker = HookWorker(tmp_path / "hook.py", 20.0)
    await worker.start()
    await reward(worker, "a")  # the process ends
    call = asyncio.create_task(reward(worker, "a"))
    await until_exists(pid_file)
    async with asyncio.timeout(15):
        await worker.close()
        assert "the proxy is stopping" in ((await call).reason or "")
    await until_gone(int(pid_file.read_text()))
