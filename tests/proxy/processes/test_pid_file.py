"""The pid file of `fakevllm up`: only its lock says whether the process runs."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fakevllm.errors import UserError
from fakevllm.processes.pid_file import NAME, PidFile, down_command, running_pid

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


def test_a_look_at_the_lock_does_not_keep_a_start_from_getting_it(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    with (tmp_path / NAME).open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)  # as `running_pid` does
        end_of_look = threading.Timer(0.1, fcntl.flock, (looking, fcntl.LOCK_UN))
        end_of_look.start()
        held = PidFile(tmp_path)
        end_of_look.join()
    assert running_pid(tmp_path) == os.getpid()
    held.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_the_file_of_another_user_is_not_taken_for_a_free_folder(tmp_path: Path) -> None:
    (tmp_path / NAME).touch(0o000)
    with pytest.raises(UserError, match="belongs to another user: run the command as this user"):
        running_pid(tmp_path)


def test_the_command_that_stops_a_run_can_be_pasted_into_a_shell() -> None:
    assert down_command(Path("my runs/$1")) == "fakevllm down --run-dir 'my runs/$1'"
