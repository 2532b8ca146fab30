"""Writes the lines of several programs to one stream, each with its program's name in front."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TextIO

from fakevllm.errors import UserError
from fakevllm.runtime.terminal_text import printable

COLORS = ("36", "32", "35", "34")
"""ANSI codes of the programs' colours: cyan, green, magenta, blue."""
MAX_WAITING_BYTES = 4 * 2**20
"""Maximum size of the lines that wait until the output takes them. Further lines are lost."""
JOIN_TIMEOUT_S = 2.0
"""Seconds to wait at the end until the output has taken the last lines."""
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


def standard_output() -> LineWriter:
    """Return a writer for the standard output. Raises UserError if the standard output is closed,
    because the next opened file would get its file descriptor number."""
    if sys.stdout is None:
        raise UserError("The standard output is closed: redirect it to a file, or use --detach.")
    return LineWriter(sys.stdout.fileno(), sys.stdout.encoding)


class LineWriter:
    """Writes lines to a file descriptor, in a thread of its own.

    An output that is slow, stopped or gone does not block the programs. The queue of waiting lines
    is limited to about MAX_WAITING_BYTES. Further lines are lost. A line in their place says how
    many lines were lost.
    """

    def __init__(self, fd: int, encoding: str = "utf-8", *, closes_fd: bool = False) -> None:
        """Start the thread. With `closes_fd`, the thread closes the file descriptor when it
        ends."""
        self._fd = fd
        self._encoding = encoding
        self._closes_fd = closes_fd
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._num_lost = 0
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queue a line to be written. Characters that the encoding does not have are replaced."""
        with self._changed:
            if self._has_ended:
                return
            if self._num_waiting_bytes >= MAX_WAITING_BYTES:
                self._num_lost += 1
                return
            self._append_number_of_lost_lines()
            self._append(f"{line}\n".encode(self._encoding, "replace"))

    def end(self, last: bytes = b"") -> None:
        """Write `last` after all waiting lines. Later lines are not written."""
        with self._changed:
            if self._has_ended:
                return
            self._append_number_of_lost_lines()
            self._append(last)
            self._has_ended = True

    def join(self) -> None:
        """Call `end`, and wait until all lines are written, but at most JOIN_TIMEOUT_S seconds."""
        self.end()
        self._thread.join(JOIN_TIMEOUT_S)

    def _append_number_of_lost_lines(self) -> None:
        if self._num_lost:
            note = f"({self._num_lost} lines are missing here, because this output was too slow)\n"
            self._num_lost = 0
            self._append(note.encode(self._encoding, "replace"))

    def _append(self, text: bytes) -> None:
        self._waiting.append(text)
        self._num_waiting_bytes += len(text)
        self._changed.notify()

    def _run(self) -> None:
        while (text := self._next()) is not None:
            with contextlib.suppress(OSError):  # isolated: the output is gone, or its disk is full
                while text:
                    text = text[os.write(self._fd, text) :]
        if self._closes_fd:
            os.close(self._fd)

    def _next(self) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._has_ended)
            if not self._waiting:
                return None
            text = self._waiting.popleft()
            self._num_waiting_bytes -= len(text)
            return text
