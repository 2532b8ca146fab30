"""Child processes that are restarted, given up, and stopped in reverse order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakevllm.errors import FakevllmError, UserError
from fakevllm.processes import restart_policy, supervisor
from fakevllm.processes.output import LineOutput
from fakevllm.processes.restart_policy import MAX_EARLY_DEATHS
from fakevllm.processes.supervisor import SupervisedProcess, supervise
from tests.proxy.scripted_swarm import until

DIES = "import sys\nprint('fakevllm: what is wrong')\nsys.exit(int(sys.argv[1]))\n"
SERVES = """
import signal, sys
def stop(*_):
    print(sys.argv[1], "stops", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print(sys.argv[1], "runs", flush=True)
while True:
    signal.pause()
"""
HANGS = """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that can be started with `python -m`."""
    (tmp_path / "dies.py").write_text(DIES)
    (tmp_path / "serves.py").write_text(SERVES)
    (tmp_path / "hangs.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(restart_policy, "FIRST_PAUSE_S", 0.001)


async def fail(listener: socket.socket, code: int) -> tuple[FakevllmError, list[str]]:
    notes: list[str] = []
    output = LineOutput(lambda line: None)
    process = SupervisedProcess("the server", "dies", [str(code)], output, listener)
    with pytest.raises(FakevllmError) as failure:
        async with supervise([process], notes.append), asyncio.timeout(60):
            await asyncio.Event().wait()
    return failure.value, notes


async def test_a_process_that_dies_at_once_is_given_up_with_its_last_line(
    listener: socket.socket,
) -> None:
    error, notes = await fail(listener, 3)
    assert str(error) == "the server does not stay up (exit code 3): what is wrong"
    assert not isinstance(error, UserError)
    assert len(notes) == MAX_EARLY_DEATHS - 1
    assert notes[0] == "the server died (exit code 3) and is started again"


async def test_a_process_that_refuses_its_settings_is_not_started_again(
    listener: socket.socket,
) -> None:
    error, notes = await fail(listener, 2)
    assert isinstance(error, UserError) and notes == []
    assert str(error) == "the server does not stay up (exit code 2): what is wrong"


async def test_processes_are_stopped_one_after_the_other_the_last_one_first(
    listener: socket.socket,
) -> None:
    lines: list[str] = []
    processes = [
        SupervisedProcess(name, "serves", [name], LineOutput(lines.append), listener)
        for name in ("server", "proxy")
    ]
    async with supervise(processes, lines.append):
        await until(lambda: len(lines) == 2)
    assert sorted(lines[:2]) == ["proxy runs", "server runs"]
    assert lines[2:] == ["proxy stops", "server stops"]


async def test_if_one_process_is_given_up_the_others_are_stopped(listener: socket.socket) -> None:
    lines: list[str] = []
    server = SupervisedProcess("server", "serves", ["server"], LineOutput(lines.append), listener)
    proxy = SupervisedProcess("proxy", "dies", ["2"], LineOutput(lines.append), listener)
    with pytest.raises(UserError, match="proxy does not stay up"):
        async with supervise([server, proxy], lines.append), asyncio.timeout(60):
            await asyncio.Event().wait()
    assert server.pid is not None and not Path(f"/proc/{server.pid}/cmdline").exists()


async def test_a_process_that_is_not_essential_is_given_up_alone(listener: socket.socket) -> None:
    lines: list[str] = []
    process = SupervisedProcess(
        "the console", "dies", ["3"], LineOutput(lambda line: None), listener, is_essential=False
    )
    async with supervise([process], lines.append):
        await until(lambda: process.is_given_up)
    assert lines[-1].endswith("(exit code 3): what is wrong; everything else goes on")
    assert listener.fileno() == -1, "clients would wait for an answer"


async def test_a_process_that_is_not_essential_and_refuses_its_settings_ends_all(
    listener: socket.socket,
) -> None:
    process = SupervisedProcess(
        "the console", "dies", ["2"], LineOutput(lambda line: None), listener, is_essential=False
    )
    with pytest.raises(UserError, match="does not stay up"):
        async with supervise([process], lambda note: None), asyncio.timeout(60):
            await asyncio.Event().wait()


async def test_a_killed_process_is_not_started_again_after_a_pause(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "FIRST_PAUSE_S", 0.3)
    starts: list[str] = []
    notes: list[str] = []
    process = SupervisedProcess("the server", "dies", ["3"], LineOutput(starts.append), listener)
    async with supervise([process], notes.append):
        await until(lambda: len(notes) == 2)  # it pauses now
        process.kill()
        await asyncio.sleep(0.6)
        assert len(starts) == 2


async def test_a_process_that_does_not_stop_is_killed_with_its_children(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_GRACE_S", 0.1)
    lines: list[str] = []
    process = SupervisedProcess("the server", "hangs", [], LineOutput(lines.append), listener)
    async with supervise([process], lines.append):
        await until(lambda: len(lines) == 1)
    await until(lambda: not is_alive(int(lines[0])))


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
