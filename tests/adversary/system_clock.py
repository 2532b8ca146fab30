"""A system clock that a test can set, for the processes that the test starts.

libfaketime (the Debian package `libfaketime`) is loaded into these processes and moves their wall
clock, also inside SQLite. The monotonic clock and the times of files do not change, just as when an
administrator or NTP sets a real clock.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_PATTERN = "*/faketime/libfaketimeMT.so.1"
_FOLDERS = ("/usr/lib", "/usr/local/lib")


def find_library() -> Path | None:
    """Return the file of libfaketime, or None if it is not installed."""
    found = [file for folder in _FOLDERS for file in Path(folder).glob(_PATTERN)]
    return found[0] if found else None


class SystemClock:
    """The wall clock of all processes that are started after `use`."""

    def __init__(self, folder: Path) -> None:
        self._offset_s = 0
        self._file = folder / "clock_offset"
        self.jump(0)

    def use(self, environment: pytest.MonkeyPatch, library: Path) -> None:
        """Set the environment variables from which later processes get this clock."""
        environment.setenv("LD_PRELOAD", str(library))
        environment.setenv("FAKETIME_TIMESTAMP_FILE", str(self._file))
        environment.setenv("FAKETIME_NO_CACHE", "1")
        environment.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        environment.setenv("NO_FAKE_STAT", "1")

    def jump(self, seconds: int) -> None:
        """Move the clock forward, or back if `seconds` is negative."""
        self._offset_s += seconds
        new = self._file.with_suffix(".new")
        new.write_text(f"{self._offset_s:+d}\n")
        new.replace(self._file)
