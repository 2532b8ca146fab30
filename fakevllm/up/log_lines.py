"""Writes the lines of several programs to one stream, each with its program's name in front."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TextIO

from fakevllm.runtime.terminal_text import printable

COLORS = ("36", "32", "35", "34")
"""ANSI codes of the programs' colours: cyan, green, magenta, blue."""
OWN_COLOR = "33"
"""ANSI code of the lines of `fakevllm up` itself: yellow."""
READY = b"\0\n"
"""Line in the pipe of `--ready-fd` that says that all programs are ready. No program writes this
line, because control characters are replaced."""


class PrefixedLines:
    """Puts the name of its program before each line.

    >>> PrefixedLines("up", ["server", "proxy"], is_colored=False).format("proxy", "listening")
    'proxy  | listening'
    """

    def __init__(self, own_name: str, names: Sequence[str], *, is_colored: bool) -> None:
        self._width = max(map(len, (own_name, *names)))
        colors = {name: COLORS[number % len(COLORS)] for number, name in enumerate(names)}
        self._colors: Mapping[str, str] = {**colors, own_name: OWN_COLOR} if is_colored else {}

    def format(self, name: str, line: str) -> str:
        """Return the line to write. Control characters are replaced, because a terminal would
        execute them."""
        prefix = f"{name:<{self._width}} |"
        color = self._colors.get(name)
        if color is not None:
            prefix = f"\x1b[{color}m{prefix}\x1b[0m"
        return f"{prefix} {printable(line, keep=chr(9))}"


def is_colored(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return True if lines on this stream should be coloured."""
    return stream.isatty() and not environment.get("NO_COLOR")


class LineWriter:
    """Writes lines to a stream, from any thread. If the stream is gone, lines are lost, and the
    programs go on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._encoding = stream.encoding or "utf-8"
        self._lock = threading.Lock()
        self._copy_fd: int | None = None

    def copy_to(self, fd: int) -> None:
        """Write all further lines to this pipe too. If its reader is gone or too slow, the copy
        ends."""
        os.set_blocking(fd, False)
        self._copy_fd = fd

    def write(self, line: str) -> None:
        with self._lock:
            try:
                # A program may print characters that this terminal cannot show.
                shown = line.encode(self._encoding, "replace").decode(self._encoding)
                self._stream.write(shown + "\n")
                self._stream.flush()
            except OSError:  # isolated: the terminal was closed
                pass
            self._copy(f"{line}\n".encode(errors="replace"))

    def end_copy(self, last: bytes) -> None:
        """Write some last bytes to the pipe, and close it."""
        with self._lock:
            self._copy(last)
            self._close_copy()

    def _copy(self, text: bytes) -> None:
        if self._copy_fd is None:
            return
        try:
            os.write(self._copy_fd, text)
        except OSError:  # isolated: nobody waits for this command to be ready any more
            self._close_copy()

    def _close_copy(self) -> None:
        if self._copy_fd is not None:
            os.close(self._copy_fd)
            self._copy_fd = None
