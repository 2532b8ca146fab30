"""Queries about the whole ledger: numbers of groups by state and reason, training runs, and
learning curves. The time of these queries does not depend on the number of groups, because the
ledger keeps counters."""

from __future__ import annotations

from sqlalchemy import Engine

from fakevllm.ledger import reads
from fakevllm.ledger.curve_reads import CurveEnds, CurvePoint, curve_ends, curve_points, whole_curve
from fakevllm.ledger.records import StepRow


class SummaryReads:
    """A reader of the ledger's counters. The methods block the thread."""

    def __init__(self, read_engine: Engine) -> None:
        self._read_engine = read_engine

    def runs(self) -> list[str]:
        """Return the ids of the server's training runs that have a learning curve in this ledger,
        newest first."""
        with self._read_engine.connect() as db:
            return list(db.exec_driver_sql(reads.RUNS).scalars())

    def curve(self, run_id: str) -> list[StepRow]:
        """Return the learning curve of one training run, with one row for each step."""
        with self._read_engine.connect() as db:
            return whole_curve(db, run_id)

    def curve_points(self, run_id: str, max_points: int) -> list[CurvePoint]:
        """Return one run's learning curve, reduced to at most `max_points` points. Each change of
        the hooks or the job may add further points."""
        with self._read_engine.connect() as db:
            return curve_points(db, run_id, max_points)

    def curve_ends(self, run_id: str) -> CurveEnds:
        """Return the beginning and the end of one run's learning curve."""
        with self._read_engine.connect() as db:
            return curve_ends(db, run_id)

    def numbers(self, subject: str) -> dict[str, int]:
        """Return the counters of one subject of the table `counters`, as a dict from name to
        number."""
        with self._read_engine.connect() as db:
            return {name: num for name, num in db.exec_driver_sql(reads.NUMBERS, (subject,))}
