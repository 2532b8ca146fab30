"""Make the release gate's decisions for an engine that holds one set of weights. Versions are
evaluated between training steps. This module does no I/O, and has no clock.

Such an engine samples only the version that it serves, and all sessions get this version. Training
therefore waits while a version is evaluated:

1. After a release, the served weights are the released weights. The served version answers the
   held-out rows that all candidates will answer later. These answers are the reference.
2. Training makes `evaluate_every` versions, and waits.
3. The served version becomes the candidate, and answers the same rows. The test in `controller`
   decides from the paired differences between the candidate and the reference.
4. After a rejection, training goes back to the released weights, and these weights are served
   again. Their answers become a new reference.

The reference has no influence on the training of a candidate. Therefore the error bounds of
`controller`, such as the maximum probability of a wrong rejection, hold for each candidate. (The
bounds hold on average over all references. Candidates that are compared with the same reference
share its random errors, so the errors of their tests are not independent.)

To keep candidates independent of the reference, a new reference is made after each release and
after each rejection. After a release, the candidate's answers cannot become the reference. These
answers were good enough for a release, so their mean reward is biased upwards. After a rejection,
the old reference cannot be used again. A candidate was rejected because the reference was better,
so the reference's mean reward is biased upwards too.

If the gate is turned on in the middle of a run, the served weights may be neither the released
weights nor weights that were trained under the gate. Training then waits for an operator.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fakevllm.release.actions import (
    Action,
    Decide,
    Evaluate,
    LimitTraining,
    SampleReference,
    Wait,
)
from fakevllm.release.controller import GateController, GateRules, ScoredPair
from fakevllm_adapters.protocol.releases import Decision, ReleasesReply

ROWS_AT_ONCE = 8
"""Number of rows that are sampled at the same time. Training waits for these rows, so they may use
the whole engine."""


class BetweenStepsController(GateController):
    """Makes the release gate's decisions about the versions of one training run, for an engine that
    holds only one set of weights."""

    def __init__(self, rules: GateRules) -> None:
        super().__init__(rules)
        self._num_reference_draws: int | None = None
        """Number of drawn rows for which the reference has an answer; None until this number has
        been read from the ledger."""

    def history_read(self, history: ReleasesReply) -> None:
        before = self.reference
        super().history_read(history)
        if self.reference != before:
            self._num_reference_draws = None
        if history.candidate is not None and history.candidate not in history.newest_copies:
            self.give_up(history.candidate, "training went on before the evaluation had ended")

    def scorer_changed(self, scorer: str) -> None:
        if scorer != self._scorer:
            self._num_reference_draws = None
        super().scorer_changed(scorer)

    @property
    def reference(self) -> str | None:
        """Name of the reference (the released version's answers to the held-out rows). The name
        changes with each release, and each time training goes back to an earlier version. None if
        the server's history of releases is not known."""
        history = self._history
        if history is None:
            return None
        changes = [
            record.number
            for record in history.records
            if record.decision is Decision.RELEASED or "restored" in record.evidence
        ]
        # Rows with another number of samples cannot be compared.
        names = (history.released, max(changes, default=0), f"{self._rules.num_samples}samples")
        return "-".join(map(str, names))

    @property
    def released_copies(self) -> list[int]:
        """All versions with the released weights. The answers of these versions to the held-out
        rows form the reference. Candidates (versions under evaluation) are compared with the
        reference."""
        return [] if self._history is None else self._history.released_copies

    @property
    def newest_copies(self) -> list[int]:
        """All versions with the same weights as the newest version. The server serves the last of
        these versions."""
        return [] if self._history is None else self._history.newest_copies

    @property
    def _base(self) -> int:
        """The version from which training counts `evaluate_every` new versions until the next
        evaluation. It is the newest of the versions in this list. A copy of a version is a version
        with the same weights.

        * the newest version with a verdict (released, rejected or undecided)
        * the copies of the released version
        * the copies of the newest version, if the oldest of these copies is not newer than the
          newest version with a verdict
        """
        base = super()._base
        same = self.newest_copies if min(self.newest_copies, default=base + 1) <= base else []
        return max([base, *self.released_copies, *same])

    @property
    def needs_reference(self) -> bool:
        """Whether the caller must read the reference (the released version's answers to the
        held-out rows) from the ledger, the proxy's database."""
        return self._history is not None and self._num_reference_draws is None

    def reference_answered(self, reference: str, num_draws: int) -> None:
        """Record that the reference (the released version's answers) has answers to the first
        `num_draws` rows that an evaluation draws. If `reference` is not the name of the present
        reference, do nothing."""
        if reference == self.reference:
            self._num_reference_draws = num_draws

    def pair_scored(self, candidate: int, released: int, draw: int, pair: ScoredPair) -> None:
        """Add the rewards of the candidate (the version under evaluation) and of the reference (the
        released version's answers) for one held-out row. If the hook failed, and the reference has
        no reward, the row is counted as drawn but not compared."""
        pair = pair if pair.released else ScoredPair([], [])
        super().pair_scored(candidate, released, draw, pair)

    def next_action(self) -> Action:
        action, history, num_draws = super().next_action(), self._history, self._num_reference_draws
        if history is None or num_draws is None or not self.released_copies:
            return Wait()
        if isinstance(action, Decide) and action.decision is not Decision.CANDIDATE:
            return action
        is_complete = num_draws >= self._rules.max_draws
        limit, next_limit = history.training_limit, self._base + self._rules.evaluate_every
        if not is_complete or history.candidate is not None:
            if limit is None or limit > self._newest:
                return LimitTraining(self._newest)
        elif limit != next_limit and not self._is_stopped:
            return LimitTraining(next_limit)
        if not is_complete:
            return self._next_of_reference(num_draws)
        if isinstance(action, Evaluate):
            is_served = {action.candidate, self._newest} <= set(self.newest_copies)
            num_left = self._rules.max_draws - action.draw
            return replace(action, num_draws=min(ROWS_AT_ONCE, num_left)) if is_served else Wait()
        return action

    def _next_of_reference(self, num_draws: int) -> Action:
        """Return the next action while the reference (the released version's answers to the
        held-out rows) is incomplete."""
        if self._is_stopped or self._newest not in self.released_copies:
            return Wait()
        assert self.reference is not None, "the history is known"
        num_left = self._rules.max_draws - num_draws
        return SampleReference(self.reference, num_draws, min(ROWS_AT_ONCE, num_left))

    @property
    def trouble(self) -> str | None:
        return super().trouble or self._unserved

    @property
    def _unserved(self) -> str | None:
        """Reason why the reference (the released version's answers to the held-out rows) cannot be
        completed, with the remedy. None if the reference can be completed."""
        history, num_draws = self._history, self._num_reference_draws
        if history is None or num_draws is None:
            return None
        if not history.released_copies:
            return "the server does not limit training: update fakevllm-server"
        size = self._rules.max_draws
        # A version that is older than the newest copy is about to be replaced.
        if num_draws >= size or self._newest <= history.released_copies[-1]:
            return None
        return (
            f"training waits, because version {self._newest} answers the apps, and the released "
            f"version {history.released} has answered only {num_draws} of {size} held-out rows: "
            "release the newest version with `fakevllm release promote "
            f"{self._newest}`, or go back with `fakevllm release rollback`"
        )

    @property
    def progress(self) -> dict[str, Any]:
        figures, num_draws = super().progress, self._num_reference_draws
        if num_draws is None or num_draws >= self._rules.max_draws:
            return figures
        return figures | {
            "reference": None if self._history is None else self._history.released,
            "reference_draws": num_draws,
            "reference_size": self._rules.max_draws,
        }
