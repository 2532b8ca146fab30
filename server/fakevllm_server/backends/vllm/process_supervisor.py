"""The process supervisor. The supervisor is a process between the server and vLLM. When the server
or vLLM ends, the supervisor ends all processes of vLLM.

    python -m fakevllm_server.backends.vllm.process_supervisor -- PROGRAM [ARGUMENT...]

The server starts the supervisor as the leader of a new process group. PROGRAM and all processes
that PROGRAM starts belong to this group. The supervisor passes SIGTERM on to PROGRAM.

The supervisor ends all other processes of the group when PROGRAM ends, or when the supervisor's
standard input closes. The standard input closes when the server is killed. The exit code of the
supervisor is PROGRAM's exit code.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fakevllm_server.backends.process.procfs import GROUP, live_processes

GRACE_S = 5.0
"""Seconds that PROGRAM has after SIGTERM to remove its shared memory and to end."""
LEFTOVER_GRACE_S = 1.0
"""Seconds that the child processes of PROGRAM have to end after SIGTERM. vLLM's engine process ends
by itself once vLLM's API process has ended."""
END_BOUND_S = 8.0
"""Maximum seconds for ending the group. The server's `STOP_GRACE_S` for the supervisor is
longer."""
POLL_INTERVAL_S = 0.02


def main() -> int:
    """Run the program whose command line is in `sys.argv`. When the program ends, end all processes
    that the program has started. Return the program's exit code. If a signal ended the program,
    return 128 plus the number of the signal."""
    command = sys.argv[1:]
    if command[:1] != ["--"] or not command[1:]:
        print("usage: process_supervisor -- PROGRAM [ARGUMENT...]", file=sys.stderr)
        return 2
    # Only the owner may access sockets and files that the engine creates.
    os.umask(0o077)
    child = subprocess.Popen(command[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda _number, _frame: child.terminate())
    if not _wait_for_exit_or_eof(child.pid):
        child.terminate()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
    code = child.wait()
    _end_group()
    return code if code >= 0 else 128 - code


def _wait_for_exit_or_eof(pid: int) -> bool:
    """Wait until the program with the process id `pid` has ended, or standard input has closed.
    Return True if the program has ended. Return False if standard input has closed."""
    process = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if process in ready:
            return True
        if not os.read(sys.stdin.fileno(), 1024):
            return False


def _end_group() -> None:
    """End all other processes of the supervisor's process group, first with SIGTERM, then with
    SIGKILL.

    Python's resource trackers get SIGKILL last, because they clean up after the other processes. A
    process that survives SIGKILL hangs in the kernel and cannot be ended.
    """
    started_at = time.monotonic()
    _send_signal(_other_processes(), signal.SIGTERM)
    while (others := _other_processes()) and time.monotonic() < started_at + END_BOUND_S:
        if time.monotonic() > started_at + LEFTOVER_GRACE_S:
            _send_signal([pid for pid in others if not _is_resource_tracker(pid)], signal.SIGKILL)
        time.sleep(POLL_INTERVAL_S)
    _send_signal(_other_processes(), signal.SIGKILL)


def _is_resource_tracker(pid: int) -> bool:
    """Return True if a process is a Python resource tracker.

    A resource tracker removes the shared memory of killed processes. The tracker ignores SIGTERM,
    and ends by itself when all processes that use the tracker have ended.
    """
    try:
        return b"resource_tracker" in (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False


def _other_processes() -> list[int]:
    """Return the ids of all other live processes in the supervisor's process group."""
    return [process for process in live_processes(GROUP, os.getpgrp()) if process != os.getpid()]


def _send_signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


if __name__ == "__main__":
    sys.exit(main())
