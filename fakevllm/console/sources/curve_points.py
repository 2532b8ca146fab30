"""The learning curve for a chart. All open pages share one copy of the curve.

The curve is read again only after another process has written to the ledger.
"""

from __future__ import annotations

import threading

from fakevllm.ledger.curve_reads import CurvePoint
from fakevllm.ledger.read_only_ledger import ReadOnlyLedger

MAX_POINTS = 400
"""Maximum number of points of a chart, apart from those that changes of the hooks add."""


class SharedCurve:
    """Reader of learning curves that keeps the latest one."""

    def __init__(self, ledger: ReadOnlyLedger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._kept: tuple[object, list[CurvePoint]] | None = None
        """The latest curve, after the id of its run and the state of the ledger's files."""

    def points(self, run_id: str) -> list[CurvePoint]:
        """Return the points of a run's curve. Call this method in a `with` block of
        `ReadOnlyLedger.reading`. The block has a time limit, so that other threads do not wait long
        for this object's lock."""
        with self._lock:
            # A write during the read changes the state, so it is seen by the next call.
            key = run_id, self._ledger.state_of_files()
            if self._kept is None or self._kept[0] != key:
                self._kept = key, self._ledger.summary.curve_points(run_id, MAX_POINTS)
            return self._kept[1]
