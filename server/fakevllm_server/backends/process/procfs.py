"""Find the live processes of a process group or a session in /proc (Linux)."""

from __future__ import annotations

from pathlib import Path

STATE, GROUP, SESSION = 0, 2, 3
"""Positions of three fields of /proc/PID/stat, counted from the field after the process's name."""


def live_processes(field: int, number: int) -> list[int]:
    """Return the ids of all processes of one process group or session, without zombies. `field` is
    GROUP or SESSION, and `number` is the id of the group or session."""
    ids: list[int] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The name may contain blanks and parentheses; the other fields follow its last ")".
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[field]) == number and fields[STATE] != "Z":
            ids.append(int(folder.name))
    return ids
