"""Which processes there are, by the kernel's word (Linux)."""

from __future__ import annotations

from pathlib import Path

STATE, GROUP, SESSION = 0, 2, 3
"""Fields of /proc/PID/stat after the process's name."""


def living(field: int, number: int) -> list[int]:
    """Ids of the processes whose GROUP or SESSION is `number`, zombies left out."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # A name may hold blanks and parentheses; the fields begin after its last one.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[field]) == number and fields[STATE] != "Z":
            found.append(int(folder.name))
    return found
