"""Writes the curves of a run while it runs. A thread reads the journal (the server's SQLite file)
and writes TensorBoard event files.

Training never waits for this thread. An error in the thread is logged and does not stop the run.
Curves that could not be written are written at the next attempt, by the next server process, or by
the command `fakevllm-server curves`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fakevllm_server.curves.event_files import EventFiles, PackageMissing
from fakevllm_server.curves.points import (
    ChartItem,
    Cursor,
    Point,
    cursor_after_rollback,
    read_evaluations,
    read_log,
)
from fakevllm_server.journal.external_reader import read_journal_file

log = logging.getLogger("fakevllm.server")

FOLDER = "tensorboard"
EVERY_S = 5.0
"""Seconds between two reads of the journal. TensorBoard reloads its files every 5 s too."""
CLOSE_LIMIT_S = 10.0
"""Maximum time in seconds that `Follower.close` waits for the thread."""


class Curves:
    """The TensorBoard curves of one run. The object also knows up to which position of the journal
    (the server's SQLite file) the curves are written."""

    def __init__(self, run_dir: Path) -> None:
        self._journal = run_dir / "journal.sqlite"
        self._files = EventFiles(run_dir / FOLDER)
        self._cursor = self._files.cursor()

    def catch_up(self, now: float, *, is_last: bool = False) -> int:
        """Write curves for everything that is new in the journal, and return the number of new
        points.

        `now` is in Unix seconds. `is_last` is True if the run has ended, so that no more
        evaluations of the last step are expected. Raises ConfigError if the journal cannot be read.
        Raises OSError if the curves cannot be written.
        """
        num = 0
        while True:
            piece = read_journal_file(self._journal, read_log, self._cursor.entry)
            if not piece.entries:
                break
            items = piece.chart_items(now)
            cursor = replace(self._cursor, entry=piece.entries[-1][0].seq)
            for entry, _ in piece.entries:
                if entry.kind == "restored":
                    cursor = read_journal_file(self._journal, cursor_after_rollback, entry, cursor)
            self._write(items, cursor)
            num += sum(isinstance(item, Point) for item in items)
        evaluations = read_journal_file(self._journal, read_evaluations, self._cursor)
        points, cursor = evaluations.new_points(self._cursor, now, is_last=is_last)
        self._write(points, cursor)
        return num + len(points)

    def clear(self) -> None:
        """Delete the curves, so that the next call of `catch_up` writes all of them again.

        If the package `tensorboard` is not installed, nothing is deleted, and PackageMissing is
        raised.
        """
        self._files.load()
        self._files.clear()
        self._cursor = Cursor()

    def close(self) -> None:
        self._files.close()

    def _write(self, items: Sequence[ChartItem], cursor: Cursor) -> None:
        if cursor != self._cursor:
            self._files.write(items, cursor)
            self._cursor = cursor


class Follower:
    """A thread that keeps the curves of a running server up to date."""

    def __init__(self, run_dir: Path, every_s: float = EVERY_S) -> None:
        self._run_dir = run_dir
        self._every_s = every_s
        self._is_closing = threading.Event()
        self._last_error: str | None = None
        self._thread = threading.Thread(target=self._run, name="curves", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Make the thread write the curves of everything that is in the journal, and then stop the
        thread. Wait for its end, but at most CLOSE_LIMIT_S seconds."""
        self._is_closing.set()
        self._thread.join(CLOSE_LIMIT_S)

    def _run(self) -> None:
        curves = Curves(self._run_dir)
        is_last = False
        while not is_last:
            is_last = self._is_closing.wait(self._every_s)
            # Catch all errors to isolate the run: curves can be written later from the journal.
            try:
                curves.catch_up(time.time(), is_last=is_last)
                self._last_error = None
            except PackageMissing as missing:
                log.info("No TensorBoard curves are written: %s", missing)
                break
            except Exception as failure:
                self._log_once(str(failure))
        curves.close()

    def _log_once(self, error: str) -> None:
        """Log the error of a failed write, unless the previous write failed with the same error."""
        if error != self._last_error:
            log.warning("TensorBoard curves cannot be written, retrying: %s", error)
        self._last_error = error
