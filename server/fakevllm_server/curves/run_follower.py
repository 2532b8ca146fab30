"""Writes the curves of a run to a tracker while the run goes on. A thread reads the journal (the
server's SQLite file) and writes the curves.

Training never waits for this thread. An error in the thread is logged and does not stop the run.
Curves that could not be written are written at the next attempt or by the next server process.
Those of TensorBoard can also be written by the command `fakevllm-server curves`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fakevllm_server.curves.points import (
    ChartItem,
    Cursor,
    LogPiece,
    Point,
    cursor_after_rollback,
    read_evaluations,
    read_log,
    read_releases,
)
from fakevllm_server.curves.sample_reader import SampleReader
from fakevllm_server.curves.tracker import Tracker, TrackerMissing
from fakevllm_server.curves.trackers import TrackerKind
from fakevllm_server.journal.external_reader import read_journal_file

log = logging.getLogger("fakevllm.server")

EVERY_S = 5.0
"""Seconds between two reads of the journal. TensorBoard reloads its files every 5 s too."""
CLOSE_LIMIT_S = 10.0
"""Maximum time in seconds that `Follower.close` waits for the thread."""


class Curves:
    """The curves of one run in one tracker. The object also knows up to which position of the
    journal (the server's SQLite file) the curves are written."""

    def __init__(
        self, run_dir: Path, tracker: Tracker, samples: SampleReader | None = None
    ) -> None:
        """Open the curves. `samples` makes the tables of sampled answers. None means that no tables
        are written."""
        self._samples = samples
        self._journal = run_dir / "journal.sqlite"
        self._tracker = tracker
        self._cursor = tracker.cursor()

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
            self._mark_tables(piece)
            items = piece.chart_items(now, None if self._samples is None else self._samples.table)
            cursor = replace(self._cursor, entry=piece.entries[-1][0].seq)
            for entry, _ in piece.entries:
                if entry.kind == "restored":
                    cursor = read_journal_file(self._journal, cursor_after_rollback, entry, cursor)
            self._write(items, cursor)
            num += sum(isinstance(item, Point) for item in items)
        evaluations = read_journal_file(self._journal, read_evaluations, self._cursor)
        points, cursor = evaluations.new_points(self._cursor, now, is_last=is_last)
        self._write(points, cursor)
        num += len(points)
        points, cursor = read_journal_file(self._journal, read_releases, self._cursor)
        self._write(points, cursor)
        return num + len(points)

    def clear(self) -> None:
        """Delete the curves, so that the next call of `catch_up` writes all of them again.

        If the tracker's package is not installed, nothing is deleted, and TrackerMissing is raised.
        """
        self._tracker.load()
        self._tracker.clear()
        self._cursor = Cursor()

    def close(self) -> None:
        self._tracker.close()

    def _mark_tables(self, piece: LogPiece) -> None:
        """Record that the tracker gets tables of samples, if one is due. This is recorded before
        the texts are read: groups that are forgotten meanwhile may be in the table."""
        if self._samples is not None and any(self._samples.is_due(one) for one, _ in piece.entries):
            self._write([], replace(self._cursor, has_tables=True))

    def _write(self, items: Sequence[ChartItem], cursor: Cursor) -> None:
        if cursor != self._cursor:
            self._tracker.write(items, cursor)
            self._cursor = cursor


class Follower:
    """Keeps the curves of a running server in one tracker up to date, in a thread or in a process
    of its own."""

    def __init__(
        self,
        run_dir: Path,
        kind: TrackerKind,
        every_s: float = EVERY_S,
        max_retry_s: float | None = None,
        samples: SampleReader | None = None,
    ) -> None:
        """Create a follower that reads the journal every `every_s` seconds. After each failure the
        follower waits twice as long as before, but at most `max_retry_s` seconds; by default, it
        always waits `every_s` seconds. `samples` makes the tables of sampled answers."""
        self._run_dir = run_dir
        self._samples = samples
        self._kind = kind
        self._every_s = every_s
        self._max_retry_s = every_s if max_retry_s is None else max_retry_s
        self._is_closing = threading.Event()
        self._last_error: str | None = None
        self._thread = threading.Thread(target=self.run, name="curves", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Make the thread write the curves of everything that is in the journal, and then stop the
        thread. Wait for its end, but at most CLOSE_LIMIT_S seconds."""
        self.begin_close()
        self._thread.join(CLOSE_LIMIT_S)

    def begin_close(self) -> None:
        """Make `run` write the rest of the curves and return."""
        self._is_closing.set()

    def run(self) -> None:
        """Write the curves until `begin_close` is called, or until the tracker turns out to be
        missing."""
        curves = Curves(self._run_dir, self._kind.open(self._run_dir), self._samples)
        is_last = False
        wait_s = self._every_s
        while not is_last:
            is_last = self._is_closing.wait(wait_s)
            # Catch all errors to isolate the run: curves can be written later from the journal.
            try:
                curves.catch_up(time.time(), is_last=is_last)
                self._last_error, wait_s = None, self._every_s
            except TrackerMissing as missing:
                log.info("No %s curves are written: %s", self._kind.title, missing)
                break
            except Exception as failure:
                self._log_once(str(failure))
                wait_s = max(self._every_s, min(2 * wait_s, self._max_retry_s))
        curves.close()

    def _log_once(self, error: str) -> None:
        """Log the error of a failed write, unless the previous write failed with the same error."""
        if error != self._last_error:
            log.warning("%s curves cannot be written, retrying: %s", self._kind.title, error)
        self._last_error = error
