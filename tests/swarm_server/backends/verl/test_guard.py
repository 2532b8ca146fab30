"""What is left of a killed trainer's session, and what ends it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakevllm_server.backends.process.procfs import SESSION, living

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
LEADER = """
import os, subprocess, sys
from pathlib import Path
from fakevllm_server.backends.verl.guard import start_guard
guard = start_guard(Path(sys.argv[1]))
subprocess.Popen(["sleep", "600"], process_group=0)  # as Ray's workers: a group of its own
print(guard.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A session's leader with a guard and a process in another group."""
    folder = tmp_path / "ray"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=ENVIRONMENT,
    )
    yield process
    process.kill()
    process.communicate()


def test_a_killed_leader_takes_its_session_and_its_folder_along(
    leader: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert leader.stdout is not None
    guard = int(leader.stdout.readline())
    assert len(living(SESSION, leader.pid)) == 2 and guard not in living(SESSION, leader.pid)

    leader.kill()
    leader.wait()
    end_of(guard)

    assert living(SESSION, leader.pid) == []
    assert not (tmp_path / "ray").exists()


def end_of(process: int) -> None:
    """Returns when a process that is not ours has ended."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return
    ready, _, _ = select.select([handle], [], [], 20)
    os.close(handle)
    assert ready, "the guard did not end"


def test_a_session_with_others_in_it_gets_no_guard(tmp_path: Path) -> None:
    """As where the trainer is started by hand, in a shell's session."""
    script = (
        "import sys; from pathlib import Path; from fakevllm_server.backends.verl.guard import *\n"
        "sys.exit(start_guard(Path(sys.argv[1])) is not None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=ENVIRONMENT, timeout=30
    )
    assert done.returncode == 0
    assert tmp_path.exists()
