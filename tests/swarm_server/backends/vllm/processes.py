"""The processes of an engine, read from /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    pid: int
    group: int
    command: str


def living_processes() -> list[Process]:
    """Return all processes that have not ended."""
    processes: list[Process] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if state != "Z":
            processes.append(Process(int(folder.name), int(group), command))
    return processes


def api_process(socket: Path) -> Process:
    """Return the process that serves the socket, not its supervisor, whose command names it too."""
    (process,) = (
        process
        for process in living_processes()
        if str(socket) in process.command and not is_supervisor(process)
    )
    assert process.pid != os.getpid()
    return process


def is_supervisor(process: Process) -> bool:
    return ".process_supervisor " in process.command
