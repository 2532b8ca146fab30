"""Implement `fakevllm down`, which stops a running `fakevllm up`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from fakevllm.errors import FakevllmError, UserError
from fakevllm.processes.pid_file import running_pid
from fakevllm.up.programs import STOP_TIMEOUT_S

POLL_EVERY_S = 0.1


def stop_running(run_dir: Path) -> None:
    """Stop the process of `fakevllm up` that uses this run directory, and wait until it has ended.
    Raises UserError if there is no such process, and FakevllmError if it does not end."""
    pid = running_pid(run_dir)
    if pid is None:
        raise UserError(
            f"No `fakevllm up` runs on {run_dir}: name its run directory with --run-dir."
        )
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:  # it ended a moment ago
        return
    except PermissionError:
        raise UserError(f"Process {pid} belongs to another user: stop it as this user.") from None
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while running_pid(run_dir) == pid:
        if time.monotonic() > deadline:
            raise FakevllmError(
                f"Process {pid} did not end within {STOP_TIMEOUT_S:.0f} s: see its log."
            )
        time.sleep(POLL_EVERY_S)
