"""The results of the latest evaluations. All open pages share one copy, so that the confidence
intervals are computed once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from fakevllm.console.sources.evaluation_results import EvaluationResult, results_of
from fakevllm.ledger.evaluation_reads import EvaluatedGroup
from fakevllm.ledger.read_only_ledger import ReadOnlyLedger
from fakevllm.statistics.confidence_sequence import RewardRange

MAX_LATEST = 4_000
"""Number of latest evaluated rows from which the results are made."""


@dataclass(frozen=True, slots=True)
class LatestEvaluations:
    """The results of the latest evaluations."""

    results: Sequence[EvaluationResult] = ()
    """Newest evaluation first."""
    is_cut: bool = False
    """Whether there may be older evaluations, which are left out."""


class SharedEvaluations:
    """Reader of evaluated rows that keeps the latest results."""

    def __init__(self, ledger: ReadOnlyLedger, declared_range: RewardRange) -> None:
        self._ledger = ledger
        self._declared_range = declared_range
        self._lock = threading.Lock()
        self._state: object = None
        """The state of the ledger's files at the latest read."""
        self._groups: list[EvaluatedGroup] = []
        self._latest = LatestEvaluations()

    def latest(self) -> LatestEvaluations:
        """Return the latest results. Call this method in a `with` block of
        `ReadOnlyLedger.reading`. The block has a time limit, so that other threads do not wait long
        for this object's lock."""
        with self._lock:
            # A write during the read changes the state, so it is seen by the next call.
            state = self._ledger.state_of_files()
            if state != self._state:
                groups = self._ledger.evaluations.latest(MAX_LATEST)
                if groups != self._groups:  # most writes are requests of apps
                    self._groups, self._latest = groups, self._results(groups)
                self._state = state
            return self._latest

    def _results(self, groups: Sequence[EvaluatedGroup]) -> LatestEvaluations:
        results = results_of(groups, self._declared_range)
        # The rows of the oldest evaluation may be cut off, so its figures would be wrong.
        is_cut = len(groups) == MAX_LATEST
        if is_cut and len(results) > 1:
            results = results[:-1]
        return LatestEvaluations(results, is_cut)
