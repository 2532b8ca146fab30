"""Write the output of a child process to a log file, or pass it to a function line by line."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

MAX_LINE_BYTES = 65_536
"""Longer lines are split, so that output without a line break is shown, too."""
END_TIMEOUT_S = 2.0
"""Seconds to wait for the last lines of a process that has ended. A child of this process may hold
the pipe open for longer."""


class ProcessOutput(Protocol):
    """The destination of a process's output."""

    @property
    def hint(self) -> str:
        """The end of an error message that says where the whole output is, or ""."""
        ...

    def open(self) -> int:
        """Return a file descriptor for the output of a new process. The caller closes it."""
        ...

    def finish(self) -> None:
        """Wait until the output of the latest process has arrived. The method blocks the thread."""
        ...

    def last_line(self) -> str:
        """Return the last line that is not blank. If a process refused its settings, this line has
        the reason."""
        ...


class LogFile:
    """A log file to which the output of a process is appended."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def hint(self) -> str:
        return f" (see {self._path})"

    def open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def finish(self) -> None:
        pass

    def last_line(self) -> str:
        return last_line(self._path) or "its log is empty"


class LineOutput:
    """Calls a function for each line of a process's output.

    A thread reads the output, so a function that blocks does not stop the event loop.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._last_line = "it printed nothing"
        self._thread: threading.Thread | None = None

    @property
    def hint(self) -> str:
        return ""

    def open(self) -> int:
        read_end, write_end = os.pipe()
        self._thread = threading.Thread(target=self._read, args=(read_end,), daemon=True)
        self._thread.start()
        return write_end

    def finish(self) -> None:
        if self._thread is not None:
            self._thread.join(END_TIMEOUT_S)

    def last_line(self) -> str:
        return self._last_line

    def _read(self, fd: int) -> None:
        splitter = LineSplitter()
        with os.fdopen(fd, "rb", buffering=0) as pipe:
            while chunk := pipe.read(MAX_LINE_BYTES):
                self._pass_on(splitter.feed(chunk))
        self._pass_on(splitter.end())

    def _pass_on(self, lines: list[str]) -> None:
        for line in lines:
            if line.strip():
                self._last_line = line
            self._on_line(line)


class LineSplitter:
    """Splits output that arrives in chunks into lines.

    >>> splitter = LineSplitter()
    >>> splitter.feed(b"one\\ntw"), splitter.feed(b"o\\n"), splitter.end()
    (['one'], ['two'], [])
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """Add a chunk of output, and return the lines that end in this chunk."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        while len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        return [_text(line) for line in lines]

    def end(self) -> list[str]:
        """Return the unfinished last line, if there is one."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def last_line(log_file: Path) -> str | None:
    """Return the last line of a log that is not blank. Only the end of the file is read, because a
    log may be large."""
    with log_file.open("rb") as log:
        log.seek(max(log.seek(0, os.SEEK_END) - MAX_LINE_BYTES, 0))
        lines = log.read().decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), None)


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode(errors="replace")
