"""A process between the server and vLLM, so that neither's end leaves anything of vLLM's behind.

    python -m fakevllm_server.backends.vllm.keeper -- PROGRAM [ARGUMENT...]

The server starts it as the leader of a process group; PROGRAM and all that it starts are in that
group. SIGTERM is passed on. Once PROGRAM has ended, however, or standard input has closed, because
the server was killed, the rest of the group is ended too. The exit code is PROGRAM's.
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

from fakevllm_server.backends.process.procfs import GROUP, living

GRACE_S = 5.0
"""For the program to end by itself after SIGTERM, and to remove its shared memory."""
LEFTOVER_GRACE_S = 1.0
"""For what the program has left running; vLLM's engine ends by itself once it is alone."""
END_BOUND_S = 8.0
"""Less than the server gives the keeper."""
LOOK_EVERY_S = 0.02


def main() -> int:
    command = sys.argv[1:]
    if command[:1] != ["--"] or not command[1:]:
        print("usage: keeper -- PROGRAM [ARGUMENT...]", file=sys.stderr)
        return 2
    # Sockets and files of the engine's are its owner's alone.
    os.umask(0o077)
    child = subprocess.Popen(command[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda _number, _frame: child.terminate())
    if not _ended_before_input(child.pid):
        child.terminate()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
    code = child.wait()
    _end_group()
    return code if code >= 0 else 128 - code


def _ended_before_input(pid: int) -> bool:
    """Waits for the end of the process, True, or of standard input, False."""
    process = os.pidfd_open(pid)
    watched = select.poll()
    watched.register(process, select.POLLIN)
    watched.register(sys.stdin.fileno(), select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in watched.poll()}
        if process in ready:
            return True
        if not os.read(sys.stdin.fileno(), 1024):
            return False


def _end_group() -> None:
    """All others of the group: asked, then made to; those that clean up after them last. What even
    SIGKILL does not end within the bound hangs in the kernel, and nobody can end it."""
    began = time.monotonic()
    _send(_others(), signal.SIGTERM)
    while (others := _others()) and time.monotonic() < began + END_BOUND_S:
        if time.monotonic() > began + LEFTOVER_GRACE_S:
            _send([one for one in others if not _cleans_up(one)], signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)
    _send(_others(), signal.SIGKILL)


def _cleans_up(pid: int) -> bool:
    """Python's own process that removes the shared memory of killed ones: it heeds no SIGTERM, and
    ends by itself after them."""
    try:
        return b"resource_tracker" in (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False


def _others() -> list[int]:
    """Living processes of our group but this one."""
    return [process for process in living(GROUP, os.getpgrp()) if process != os.getpid()]


def _send(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


if __name__ == "__main__":
    sys.exit(main())
