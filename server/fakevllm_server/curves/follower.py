"""Curves of a run while it runs: a thread that follows the journal as any reader may.

It is in nobody's way: no step waits for it, and its trouble ends in a line of the log. What it has
not written, its next look writes, or the next life, or `fakevllm-server curves`.
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
    Point,
    read_back,
    read_evaluations,
    read_log,
)
from fakevllm_server.curves.writer import EventFiles, PackageMissing
from fakevllm_server.journal.offline import read_journal_file

log = logging.getLogger("fakevllm.server")

FOLDER = "tensorboard"
EVERY_S = 5.0
"""As often as TensorBoard looks."""
CLOSE_LIMIT_S = 10.0


class Curves:
    """One run's, as far as its journal goes."""

    def __init__(self, run_dir: Path) -> None:
        self._journal = run_dir / "journal.sqlite"
        self._files = EventFiles(run_dir / FOLDER)
        self._cursor = self._files.cursor()

    def catch_up(self, now: float, *, is_last: bool = False) -> int:
        """How many points were written. `is_last`: the run has ended, and so has its last step.
        Raises ConfigError, OSError."""
        num = 0
        while True:
            found = read_journal_file(self._journal, read_log, self._cursor.entry)
            if not found.entries:
                break
            charted = found.charted(now)
            cursor = replace(self._cursor, entry=found.entries[-1][0].seq)
            for entry, _ in found.entries:
                if entry.kind == "restored":
                    cursor = read_journal_file(self._journal, read_back, entry, cursor)
            self._write(charted, cursor)
            num += sum(isinstance(one, Point) for one in charted)
        evaluations = read_journal_file(self._journal, read_evaluations, self._cursor)
        points, cursor = evaluations.charted(self._cursor, now, is_last=is_last)
        self._write(points, cursor)
        return num + len(points)

    def begin_anew(self) -> None:
        """Raises ConfigError."""
        self._files.load()
        self._files.clear()
        self._cursor = Cursor()

    def close(self) -> None:
        self._files.close()

    def _write(self, charted: Sequence[ChartItem], cursor: Cursor) -> None:
        if cursor != self._cursor:
            self._files.write(charted, cursor)
            self._cursor = cursor


class Follower:
    def __init__(self, run_dir: Path, every_s: float = EVERY_S) -> None:
        self._run_dir = run_dir
        self._every_s = every_s
        self._is_closing = threading.Event()
        self._trouble: str | None = None
        self._thread = threading.Thread(target=self._run, name="curves", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Writes what the journal holds by now."""
        self._is_closing.set()
        self._thread.join(CLOSE_LIMIT_S)

    def _run(self) -> None:
        curves = Curves(self._run_dir)
        is_last = False
        while not is_last:
            is_last = self._is_closing.wait(self._every_s)
            # Isolated: curves can be written later, from the journal.
            try:
                curves.catch_up(time.time(), is_last=is_last)
                self._tell(None)
            except PackageMissing as missing:
                log.info("no curves: %s", missing)
                break
            except Exception as failure:
                self._tell(str(failure))
        curves.close()

    def _tell(self, trouble: str | None) -> None:
        """Once, however long it lasts."""
        if trouble is not None and trouble != self._trouble:
            log.warning("curves for TensorBoard are not written, trying on: %s", trouble)
        self._trouble = trouble
