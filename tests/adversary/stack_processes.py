"""The child processes of a proxy and a server, and an app that repeats its requests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.demo_parts.process_kills import child_pids
from tests.e2e.processes import Process, wait_until

LIMIT_S = 40.0
RETRY_EVERY_S = 0.1


def engine_pid(server: Process) -> int:
    """Return the id of the engine's process. Wait if it is being started."""
    return _wait_for_child(server, lambda _: True)


def hook_pid(proxy: Process) -> int:
    """Return the id of the hook process. Wait if it is being started."""
    return _wait_for_child(proxy, lambda command: b"spawn_main" in command)


def _wait_for_child(parent: Process, is_wanted: Callable[[bytes], bool]) -> int:
    found: list[int] = []

    def find() -> bool:
        found[:] = [pid for pid in child_pids(parent.pid) if is_wanted(_command_of(pid))]
        return bool(found)

    wait_until(find, LIMIT_S, f"a child of {parent.name}")
    return found[0]


def _command_of(pid: int) -> bytes:
    """Return the command line of a process, or b"" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def freeze(pid: int) -> None:
    """Suspend a process, and wait until all its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)

    def is_stopped() -> bool:
        threads = Path(f"/proc/{pid}/task").glob("*/stat")
        return all(file.read_text().rpartition(")")[2].split()[0] == "T" for file in threads)

    wait_until(is_stopped, LIMIT_S, f"process {pid} to stop")


def num_running(server: Process) -> int:
    """Return the number of calls that the engine samples at present."""
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


def send_until_answered(proxy: Process, body: dict[str, Any], key: str) -> list[int | str]:
    """Send a request with an idempotency key until an answer is complete.

    Return the status or the error of each attempt; the last one is 200.
    """
    attempts: list[int | str] = []
    deadline = time.monotonic() + LIMIT_S
    while attempts[-1:] != [200]:
        assert time.monotonic() < deadline, attempts
        try:
            headers = {"Idempotency-Key": key}
            url = f"{proxy.url}/v1/chat/completions"
            reply = httpx.post(url, json=body, headers=headers, timeout=LIMIT_S)
            is_cut_off = body.get("stream") and '"error"' in reply.text
            attempts.append("cut off" if is_cut_off else reply.status_code)
        except httpx.TransportError as error:
            attempts.append(type(error).__name__)
        if attempts[-1] != 200:
            time.sleep(RETRY_EVERY_S)
    return attempts
