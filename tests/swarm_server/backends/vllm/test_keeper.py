"""The keeper: nothing of a program's process group outlives the program, or the server."""

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
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
if "share" in sys.argv:
    from multiprocessing.shared_memory import SharedMemory

    memory = SharedMemory(create=True, size=1)
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        print(memory.name, flush=True)
if "leave" in sys.argv:
    sys.exit(3)
time.sleep(600)
"""
"""It has a child that only SIGKILL ends, as engines have that hang."""


@contextmanager
def kept(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A running keeper, and the process id of its program."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    keeper = subprocess.Popen(
        [
            *(sys.executable, "-m", "fakevllm_server.backends.vllm.keeper", "--"),
            *(sys.executable, str(script), *arguments),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert keeper.stdin is not None and keeper.stdout is not None
    try:
        yield keeper, int(keeper.stdout.readline())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()
        keeper.stdin.close()
        keeper.stdout.close()


def living(group: int) -> list[str]:
    """Names of the group's processes that run."""
    found = subprocess.run(
        ["ps", "-eo", "pgid=,stat=,comm="], capture_output=True, text=True, check=True
    ).stdout
    lines = [line.split() for line in found.splitlines()]
    return [name for pgid, state, name, *_ in lines if int(pgid) == group and state[0] != "Z"]


def test_a_program_that_ends_takes_what_it_started_along_and_its_code_is_told(
    tmp_path: Path,
) -> None:
    with kept(tmp_path, "leave") as (keeper, _):
        assert keeper.wait(20) == 3
        assert living(keeper.pid) == []


def test_a_killed_program_takes_what_it_started_along(tmp_path: Path) -> None:
    with kept(tmp_path) as (keeper, program):
        assert len(living(keeper.pid)) == 3
        os.kill(program, signal.SIGKILL)
        assert keeper.wait(20) == 128 + signal.SIGKILL
        assert living(keeper.pid) == []


def test_the_shared_memory_of_a_killed_program_is_freed(tmp_path: Path) -> None:
    with kept(tmp_path, "share") as (keeper, program):
        assert keeper.stdout is not None
        memory = Path("/dev/shm") / keeper.stdout.readline().strip()
        assert memory.exists()
        os.kill(program, signal.SIGKILL)
        keeper.wait(20)
        assert not memory.exists()


def test_a_request_to_end_is_passed_on(tmp_path: Path) -> None:
    with kept(tmp_path) as (keeper, _):
        keeper.terminate()
        assert keeper.wait(20) == 7
        assert living(keeper.pid) == []


def test_nothing_is_left_once_the_server_is_gone(tmp_path: Path) -> None:
    with kept(tmp_path) as (keeper, _):
        assert keeper.stdin is not None
        keeper.stdin.close()
        assert keeper.wait(20) == 7
        assert living(keeper.pid) == []


@pytest.mark.slow
def test_a_program_that_does_not_listen_is_ended_all_the_same(tmp_path: Path) -> None:
    with kept(tmp_path, "deaf") as (keeper, _):
        assert keeper.stdin is not None
        began = time.monotonic()
        keeper.stdin.close()
        assert keeper.wait(30) == 128 + signal.SIGKILL
        assert time.monotonic() - began >= 5
        assert living(keeper.pid) == []


def test_sockets_it_makes_are_its_owners_alone(tmp_path: Path) -> None:
    code = f"import socket; socket.socket(socket.AF_UNIX).bind({str(tmp_path / 's')!r})"
    keeper = [sys.executable, "-m", "fakevllm_server.backends.vllm.keeper", "--"]
    whole = [*keeper, sys.executable, "-c", code]
    with subprocess.Popen(whole, stdin=subprocess.PIPE, start_new_session=True) as running:
        assert running.wait(20) == 0
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700


def test_without_a_program_its_use_is_told() -> None:
    bare = subprocess.run(
        [sys.executable, "-m", "fakevllm_server.backends.vllm.keeper"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert bare.returncode == 2 and "usage: keeper -- PROGRAM" in bare.stderr
