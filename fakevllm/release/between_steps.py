"""The release gate's decisions for an engine that holds one set of weights: versions are evaluated
between training steps. This module does no I/O, and has no clock.

Such an engine samples only the version that it serves, and all sessions get this version. Training
therefore waits while a version is evaluated:

1. After a release, the served weights are the released ones. They answer the rows that all
   candidates will answer. These answers are the reference.
2. Training makes `evaluate_every` versions, and waits.
3. The served version becomes the candidate, and answers the same rows. The paired differences to
   the reference decide, by the test in `controller`.
4. A rejection lets training go back, so the released weights are served again. They make a new
   reference.

A candidate does not depend on the reference before it is compared with it, so the bounds of
`controller` hold for each candidate. For this, two references must be new. The answers with which a
candidate was released are too good in the mean, because they were good enough for a release. The
reference with which a candidate was rejected is too good too.

If the served weights are neither the released ones nor trained under the gate, for example because
the gate was turned on in the middle of a run, training waits for an operator.
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
from fakevllm.release.controller import GateController, GateRules
from fakevllm_adapters.protocol.releases import Decision, ReleasesReply

ROWS_AT_ONCE = 8
"""Number of rows that are sampled at the same time. Training waits for them, so they use the whole
engine."""


class BetweenStepsController(GateController):
    """The decisions of one proxy's gate about one run, if the engine holds one set of weights."""

    def __init__(self, rules: GateRules) -> None:
        super().__init__(rules)
        self._num_reference_draws: int | None = None
        """Number of draws that the reference has answered; None until it has been read."""

    def history_read(self, history: ReleasesReply) -> None:
        before = self.reference
        super().history_read(history)
        if self.reference != before:
            self._num_reference_draws = None

    def scorer_changed(self, scorer: str) -> None:
        if scorer != self._scorer:
            self._num_reference_draws = None
        super().scorer_changed(scorer)

    @property
    def reference(self) -> int | None:
        """The version that names the reference: the first one with the released weights since the
        latest rejection. None if the server has not said which versions have these weights."""
        copies = self.reference_copies
        return copies[0] if copies else None

    @property
    def reference_copies(self) -> list[int]:
        """The versions that have the released weights, since the latest rejection. Their answers
        make the reference."""
        history = self._history
        if history is None:
            return []
        last_rejected = max(history.rejected, default=-1)
        return [copy for copy in history.released_copies if copy > last_rejected]

    @property
    def _base(self) -> int:
        """The newest version that a verdict was about, or the newest one with the released weights.
        Training makes `evaluate_every` versions after it."""
        return max([super()._base, *self.reference_copies])

    @property
    def candidate_copies(self) -> list[int]:
        """The versions that have the candidate's weights, of which the server serves the last."""
        return [] if self._history is None else self._history.candidate_copies

    @property
    def needs_reference(self) -> bool:
        """Whether the answers that the ledger has of the reference must be read."""
        return self.reference is not None and self._num_reference_draws is None

    def reference_answered(self, reference: int, num_draws: int) -> None:
        """Record how many draws the reference has answered, from the first one on."""
        if reference == self.reference:
            self._num_reference_draws = num_draws

    def version_published(self, version: int) -> None:
        super().version_published(version)
        copies = self.candidate_copies
        if copies and version > copies[-1]:
            self.give_up(copies[0], "training went on before the evaluation had ended")

    def next_action(self) -> Action:
        action, history = super().next_action(), self._history
        if history is None or self.reference is None or self._num_reference_draws is None:
            return Wait()
        if isinstance(action, Decide) and action.decision is not Decision.CANDIDATE:
            return action
        if self._num_reference_draws < self._rules.max_draws:
            return self._next_of_reference(history, self._num_reference_draws)
        if isinstance(action, Evaluate):
            is_served = self._newest in self.candidate_copies
            num_left = self._rules.max_draws - action.draw
            return replace(action, num_draws=min(ROWS_AT_ONCE, num_left)) if is_served else Wait()
        limit = self._base + self._rules.evaluate_every
        if history.candidate is None and not self._is_stopped and history.training_limit != limit:
            return LimitTraining(limit)
        return action

    def _next_of_reference(self, history: ReleasesReply, num_draws: int) -> Action:
        """Return what is due while the reference is not complete."""
        limit, reference = history.training_limit, self.reference
        assert reference is not None, "it is checked by the caller"
        if limit is None or limit > self._newest:
            return LimitTraining(self._newest)
        if self._is_stopped or self._newest not in self.reference_copies:
            return Wait()
        num_left = self._rules.max_draws - num_draws
        return SampleReference(reference, num_draws, min(ROWS_AT_ONCE, num_left))

    @property
    def trouble(self) -> str | None:
        return super().trouble or self._unserved

    @property
    def _unserved(self) -> str | None:
        """Reason why no reference can be made, and what to do; None if there is none."""
        history, copies = self._history, self.reference_copies
        if history is None:
            return None
        if not copies:
            return "the server does not limit training: update fakevllm-server"
        num_draws = self._num_reference_draws
        is_complete = num_draws is None or num_draws >= self._rules.max_draws
        if is_complete or self._newest <= copies[-1]:  # an older one is about to be replaced
            return None
        return (
            f"training waits, because version {self._newest} answers the apps and version "
            f"{history.released} is the released one: release the newest version with `fakevllm "
            f"release promote {self._newest}`, or go back with `fakevllm release rollback`"
        )

    @property
    def progress(self) -> dict[str, Any]:
        figures, num_draws = super().progress, self._num_reference_draws
        if num_draws is None or num_draws >= self._rules.max_draws:
            return figures
        return figures | {
            "reference": self.reference,
            "reference_draws": num_draws,
            "reference_size": self._rules.max_draws,
        }
