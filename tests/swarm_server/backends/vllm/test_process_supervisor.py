"""The process supervisor: no process of the group outlives the program or the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.DEVNULL)
if "ignore-sigterm" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
if "shared-memory" in sys.argv:
    from multiprocessing.shared_memory import SharedMemory

    memory = SharedMemory(create=True, size=1)
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        print(memory.name, flush=True)
if "exit" in sys.argv:
    sys.exit(3)
time.sleep(600)
"""
"""A program with a child process that only SIGKILL ends, like the process of a hung engine."""


@contextmanager
def supervised(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a supervisor. Yield it and the process id of its program."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    supervisor = subprocess.Popen(
        [
            *(sys.executable, "-m", "fakevllm_server.backends.vllm.process_supervisor", "--"),
            *(sys.executable, str(script), *arguments),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert supervisor.stdin is not None and supervisor.stdout is not None
    try:
        yield supervisor, int(supervisor.stdout.readline())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(supervisor.pid, signal.SIGKILL)
        supervisor.wait()
        supervisor.stdin.close()
        supervisor.stdout.close()


def living(group: int) -> list[str]:
    """Return the names of the running processes of a group."""
    listing = subprocess.run(
        ["ps", "-eo", "pgid=,stat=,comm="], capture_output=True, text=True, check=True
    ).stdout
    lines = [line.split() for line in listing.splitlines()]
    return [name for pgid, state, name, *_ in lines if int(pgid) == group and state[0] != "Z"]


def test_the_group_ends_with_its_program_and_the_exit_code_is_passed_on(tmp_path: Path) -> None:
    with supervised(tmp_path, "exit") as (supervisor, _):
        assert supervisor.wait(20) == 3
        assert living(supervisor.pid) == []


def test_the_group_ends_with_a_killed_program(tmp_path: Path) -> None:
    with supervised(tmp_path) as (supervisor, program):
        assert len(living(supervisor.pid)) == 3
        os.kill(program, signal.SIGKILL)
        assert supervisor.wait(20) == 128 + signal.SIGKILL
        assert living(supervisor.pid) == []


def test_the_shared_memory_of_a_killed_program_is_freed(tmp_path: Path) -> None:
    with supervised(tmp_path, "shared-memory") as (supervisor, program):
        assert supervisor.stdout is not None
        memory = Path("/dev/shm") / supervisor.stdout.readline().strip()
        assert memory.exists()
        os.kill(program, signal.SIGKILL)
        supervisor.wait(20)
        assert not memory.exists()


def test_sigterm_is_passed_on_to_the_program(tmp_path: Path) -> None:
    with supervised(tmp_path) as (supervisor, _):
        supervisor.terminate()
        assert supervisor.wait(20) == 7
        assert living(supervisor.pid) == []


def test_the_group_ends_when_the_server_is_killed(tmp_path: Path) -> None:
    with supervised(tmp_path) as (supervisor, _):
        assert supervisor.stdin is not None
        supervisor.stdin.close()
        assert supervisor.wait(20) == 7
        assert living(supervisor.pid) == []


@pytest.mark.slow
def test_a_program_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    with supervised(tmp_path, "ignore-sigterm") as (supervisor, _):
        assert supervisor.stdin is not None
        started_at = time.monotonic()
        supervisor.stdin.close()
        assert supervisor.wait(30) == 128 + signal.SIGKILL
        assert time.monotonic() - started_at >= 5
        assert living(supervisor.pid) == []


def test_only_the_owner_may_access_a_socket_of_the_program(tmp_path: Path) -> None:
    code = f"import socket; socket.socket(socket.AF_UNIX).bind({str(tmp_path / 's')!r})"
    supervisor = [sys.executable, "-m", "fakevllm_server.backends.vllm.process_supervisor", "--"]
    command = [*supervisor, sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as running:
        assert running.wait(20) == 0
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700


def test_without_a_program_the_usage_is_printed() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "fakevllm_server.backends.vllm.process_supervisor"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert result.returncode == 2 and "usage: process_supervisor -- PROGRAM" in result.stderr
