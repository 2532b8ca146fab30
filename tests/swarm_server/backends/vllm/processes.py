"""Processes of an engine, as the kernel tells them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Running(NamedTuple):
    pid: int
    group: int
    command: str


def running() -> list[Running]:
    """Every process that has not ended."""
    found: list[Running] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if state != "Z":
            found.append(Running(int(folder.name), int(group), command))
    return found


def api_process(socket: Path) -> Running:
    """The one that serves the socket; its keeper names it too."""
    (found,) = (
        one for one in running() if str(socket) in one.command and ".keeper " not in one.command
    )
    assert found.pid != os.getpid()
    return found
