"""The pid file of `fakevllm up`: only its lock says whether the process runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fakevllm.errors import UserError
from fakevllm.processes.pid_file import NAME, PidFile, running_pid

HOLD = (
    "import sys, pathlib\n"
    "from fakevllm.processes.pid_file import PidFile\n"
    "held = PidFile(pathlib.Path(sys.argv[1]))\n"
    "print('held', flush=True)\n"
    "sys.stdin.read()\n"
)


def test_a_folder_is_free_before_and_after_and_in_use_in_between(tmp_path: Path) -> None:
    assert running_pid(tmp_path) is None
    held = PidFile(tmp_path)
    assert running_pid(tmp_path) == os.getpid()
    with pytest.raises(UserError, match=rf"process {os.getpid()}\): stop it with `fakevllm down"):
        PidFile(tmp_path)
    held.close()
    assert running_pid(tmp_path) is None
    PidFile(tmp_path).close()


def test_the_pid_of_a_process_that_was_killed_does_not_count(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert running_pid(tmp_path) == holder.pid
        holder.kill()
        holder.wait(10)
    assert (tmp_path / NAME).read_text() == f"{holder.pid}\n"
    assert running_pid(tmp_path) is None


def test_a_pid_that_another_process_has_by_now_does_not_count(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(f"{os.getppid()}\n")
    assert running_pid(tmp_path) is None
    held = PidFile(tmp_path)
    assert (tmp_path / NAME).read_text() == f"{os.getpid()}\n"
    held.close()


def test_a_folder_that_cannot_be_used_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose another --run-dir"):
        PidFile(tmp_path / "none")
