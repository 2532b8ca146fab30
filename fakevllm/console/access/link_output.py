"""Write the login links to the console's standard output.

A separate thread writes the lines, so that a paused terminal or a pipe that nobody reads does not
block the console's pages.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from typing import TextIO

MAX_WAITING = 8
"""Maximum number of lines that wait for the output. Further lines are lost: their links are as good
as those that wait."""

log = logging.getLogger("fakevllm.console.access.link_output")


class LinkOutput:
    """Writes lines to a stream. If the stream is closed, the log gets the lines instead."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._waiting: queue.Queue[str] = queue.Queue(MAX_WAITING)
        threading.Thread(target=self._run, daemon=True, name="link output").start()

    def write(self, line: str) -> None:
        """Queue a line for the output, and return at once."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:  # translates
            log.warning("a link for the login is lost, because the standard output is too slow")

    def _run(self) -> None:
        while True:
            line = self._waiting.get()
            try:
                self._write(f"{line}\n".encode())
            except (OSError, ValueError) as error:  # isolates: the output is closed or full
                log.warning("the standard output cannot be written (%s): %s", error, line)

    def _write(self, data: bytes) -> None:
        if self._stream is None:
            raise ValueError("it was closed at the start")
        # `print` would keep the bytes of a failed line, and fail again when the process ends.
        while data:
            data = data[os.write(self._stream.fileno(), data) :]
