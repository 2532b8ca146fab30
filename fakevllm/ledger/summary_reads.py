"""Queries about the whole ledger: numbers of groups by state and reason, training runs, and
learning curves. The time of these queries does not depend on the number of groups, because the
ledger keeps counters."""

from __future__ import annotations

from sqlalchemy import Engine

from fakevllm.ledger import reads
from fakevllm.ledger.curve_reads import CurveEnds, CurvePoint, curve_ends, curve_points, whole_curve
from fakevllm.ledger.learning_costs import LearningCosts, StepSeconds, TokenCosts
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

    def costs(self, run_id: str) -> LearningCosts:
        """Return the numbers of tokens and the seconds of one run, and the tokens of all
        requests."""
        all_tokens = self.numbers("tokens")
        with self._read_engine.connect() as db:
            tokens = db.exec_driver_sql(reads.RUN_TOKENS, (run_id,)).one()
            seconds = db.exec_driver_sql(reads.RUN_SECONDS, (run_id,)).one()
        names = ("sampled", "served", "trained")
        return LearningCosts(
            TokenCosts(*tokens),
            StepSeconds(*seconds),
            TokenCosts(*(all_tokens.get(name, 0) for name in names)),
            all_tokens.get("evaluated", 0),
        )

    def steps_of_versions(self, run_id: str) -> dict[int, int]:
        """Return the training step that made each version of the weights of one run."""
        with self._read_engine.connect() as db:
            rows = db.exec_driver_sql(reads.VERSION_STEPS, (run_id,))
            return {version: step for version, step in rows}

    def numbers(self, subject: str) -> dict[str, int]:
        """Return the counters of one subject of the table `counters`, as a dict from name to
        number."""
        with self._read_engine.connect() as db:
            return {name: num for name, num in db.exec_driver_sql(reads.NUMBERS, (subject,))}
