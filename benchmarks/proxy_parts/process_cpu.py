"""CPU time of other processes, in nanoseconds, from the clock that Linux keeps for each process."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

_CPUCLOCK_SCHED = 2
"""Kind of clock that measures the time for which the scheduler ran a process. The kernel computes
the id of a process's clock from this kind and the process id, as clock_getcpuclockid(3) does."""


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds of one process and all its threads. Return 0 for a process that has
    ended."""
    try:
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0


def child_pids(pid: int) -> list[int]:
    """Return the running child processes of a process, from all of its threads."""
    pids: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            pids += [int(child) for child in (thread / "children").read_text().split()]
    return pids


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its running children."""
    return process_cpu_s(pid) + children_cpu_s(pid)


def children_cpu_s(pid: int) -> float:
    """Return the CPU seconds of the running children of a process, and of their children."""
    return sum(cpu_seconds(child) for child in child_pids(pid))
