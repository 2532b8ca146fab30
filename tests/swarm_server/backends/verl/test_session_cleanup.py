"""The cleanup process ends the session of a killed trainer."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakevllm_server.backends.process.procfs import SESSION, live_processes

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
LEADER = """
import os, subprocess, sys
from pathlib import Path
from fakevllm_server.backends.verl.session_cleanup import start_cleanup_process
cleanup = start_cleanup_process(Path(sys.argv[1]))
# Like Ray's workers, in a process group of its own.
subprocess.Popen(["sleep", "600"], process_group=0)
print(cleanup.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a session leader with a cleanup process and a process in another group."""
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


def test_the_session_and_its_folder_end_with_a_killed_leader(
    leader: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert leader.stdout is not None
    cleanup = int(leader.stdout.readline())
    assert len(live_processes(SESSION, leader.pid)) == 2 and cleanup not in live_processes(
        SESSION, leader.pid
    )

    leader.kill()
    leader.wait()
    wait_for_end(cleanup)

    assert live_processes(SESSION, leader.pid) == []
    assert not (tmp_path / "ray").exists()


def wait_for_end(process: int) -> None:
    """Wait until a process has ended that is not a child of this process."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return
    ready, _, _ = select.select([handle], [], [], 20)
    os.close(handle)
    assert ready, "the cleanup process did not end"


def test_a_trainer_that_does_not_lead_its_session_gets_no_cleanup_process(tmp_path: Path) -> None:
    """A trainer that is started by hand is in the shell's session."""
    script = (
        "import sys; from pathlib import Path\n"
        "from fakevllm_server.backends.verl.session_cleanup import *\n"
        "sys.exit(start_cleanup_process(Path(sys.argv[1])) is not None)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=ENVIRONMENT, timeout=30
    )
    assert result.returncode == 0
    assert tmp_path.exists()
