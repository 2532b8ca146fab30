"""The release gate's decisions: which version becomes a candidate, and when it is released,
rejected or undecided. This module does no I/O, and has no clock.

The controller is a function of what it is given: the server's history of releases, the newest
version, the scored pairs of the candidate's evaluation in the order of their draws, and the
sessions that were scored since the latest verdict. `next_action` names what is due. A decision
stays due until the history contains it, so the process may die at any time, and a decision may be
sent twice.

Two tests run during each cycle, which ends with a verdict:

* Held-out rows: the candidate and the released version answer the same rows. Their paired
  difference has the confidence sequence (low, high). low > -margin releases the candidate, and
  high < -margin rejects it.
* Live sessions: the training arm (the versions since the latest verdict) against the released arm.
  This test can only reject.

Each test rejects a version that is not worse by more than `margin` with a probability of at most
alpha / 2, however often it is looked at, so both together with at most alpha.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fakevllm.statistics.betting_sequence import BettingSequence
from fakevllm.statistics.confidence_sequence import RewardRange
from fakevllm_adapters.protocol.releases import GATE, Decision, ReleasesReply

_VERDICTS = (Decision.RELEASED, Decision.REJECTED, Decision.UNDECIDED)


@dataclass(frozen=True, slots=True)
class GateRules:
    """The settings of the gate."""

    rewards: RewardRange
    """Range of a single reward. Rewards outside of it count as its nearest end."""
    num_samples: int = 4
    """Samples of a held-out row with each of the two versions."""
    evaluate_every: int = 20
    """Versions after which the newest one becomes a candidate."""
    margin: float = 0.05
    """Loss of mean reward that is acceptable."""
    alpha: float = 0.05
    """Probability with which an acceptable candidate is rejected, at most."""
    max_samples: int = 2000
    """Number of the candidate's samples after which it is undecided."""

    @property
    def max_draws(self) -> int:
        """Number of held-out rows that are drawn for one candidate, at most."""
        return max(1, self.max_samples // self.num_samples)


@dataclass(frozen=True, slots=True)
class ScoredPair:
    """The rewards of one drawn row. A list is empty if its version got no reward for the row; the
    pair then counts only as a draw."""

    released: Sequence[float]
    candidate: Sequence[float]


@dataclass(frozen=True, slots=True)
class ScoredSession:
    """The outcome of one session of an app. Each session is passed to the controller once, because
    its turns are not independent."""

    version: int | None
    """Version that answered a session of the training arm; None for the released arm."""
    mean: float
    """Mean reward of the session's siblings."""


@dataclass(frozen=True, slots=True)
class Decide:
    """A decision to send to the server."""

    id: str
    """Id of the request. It is the same until the history changes."""
    decision: Decision
    version: int | None
    """Version that is decided about; None for a candidate, which is the server's newest version."""
    evidence: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Evaluate:
    """A held-out row to sample with two versions."""

    candidate: int
    released: int
    draw: int
    """Number of the next draw, from 0."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is due before the next event."""


Action = Decide | Evaluate | Wait


class GateController:
    """The decisions of one proxy's gate about one run of the server."""

    def __init__(self, rules: GateRules) -> None:
        self._rules = rules
        self._history: ReleasesReply | None = None
        self._newest = 0
        self._evaluation: _Evaluation | None = None
        self._live = _LiveTest(rules)

    def history_read(self, history: ReleasesReply) -> None:
        """Replace the known history by the one that the server has now."""
        if self._verdict_number(history) != self._verdict_number(self._history):
            self._live = _LiveTest(self._rules)
        self._history = history
        versions = None
        if history.candidate is not None:
            versions = (history.candidate, history.released)
        if versions is None:
            self._evaluation = None
        elif self._evaluation is None or self._evaluation.versions != versions:
            self._evaluation = _Evaluation(*versions, self._rules)

    def version_published(self, version: int) -> None:
        """Record the newest version, which the server serves now."""
        self._newest = version

    def pair_scored(self, candidate: int, released: int, draw: int, pair: ScoredPair) -> None:
        """Add the next drawn row of an evaluation. Rows of another evaluation, and draws out of
        order, are ignored."""
        evaluation = self._evaluation
        if evaluation is None or evaluation.versions != (candidate, released):
            return
        if draw == evaluation.num_draws and not evaluation.is_decided:
            evaluation.add(pair)

    def session_scored(self, session: ScoredSession) -> None:
        """Add a session that an app had since the latest verdict. A session of the training arm
        counts if its version is newer than all versions of earlier verdicts."""
        if session.version is None or session.version > self._base:
            self._live.add(session)

    def next_action(self) -> Action:
        """Return what is due now."""
        history, evaluation = self._history, self._evaluation
        if history is None:
            return Wait()
        if (worse := self._live.rejected) is not None:
            evidence = self._live.evidence() | {"released": history.released}
            return self._decide(Decision.REJECTED, worse, evidence)
        if evaluation is not None:
            return self._next_of(evaluation, history)
        is_due = self._newest - self._base >= self._rules.evaluate_every
        if is_due and not history.is_held:
            return Decide(
                self._id(self._newest, Decision.CANDIDATE), Decision.CANDIDATE, version=None
            )
        return Wait()

    @property
    def latest_verdict(self) -> int:
        """Number of the decision with which the present comparison of live sessions began."""
        return self._verdict_number(self._history)

    @property
    def progress(self) -> dict[str, Any]:
        """The figures of the current evaluation; empty without a candidate."""
        return {} if self._evaluation is None else self._evaluation.evidence()

    def _next_of(self, evaluation: _Evaluation, history: ReleasesReply) -> Action:
        """Return what is due for the candidate."""
        candidate, released = evaluation.versions
        verdict = evaluation.verdict
        if verdict is None:
            return Evaluate(candidate, released, evaluation.num_draws)
        if verdict is Decision.RELEASED and history.is_held:
            return Wait()
        return self._decide(verdict, candidate, evaluation.evidence())

    def _decide(self, decision: Decision, version: int, evidence: dict[str, Any]) -> Decide:
        return Decide(self._id(version, decision), decision, version, evidence)

    def _id(self, version: int, decision: Decision) -> str:
        assert self._history is not None, "a decision follows from a history"
        records = self._history.records
        last = records[-1].number if records else 0
        return f"{GATE}-{version}-{decision}-{last}"

    @property
    def _base(self) -> int:
        """The newest version that a verdict was about. Rejected versions include those that descend
        from one."""
        history = self._history
        if history is None:
            return 0
        verdicts = [
            record.version
            for record in history.records
            if record.decision in _VERDICTS and record.version is not None
        ]
        return max([history.released, *verdicts, *history.rejected])

    @staticmethod
    def _verdict_number(history: ReleasesReply | None) -> int:
        """Return the number of the latest verdict in a history, or 0."""
        records = [] if history is None else history.records
        return max((one.number for one in records if one.decision in _VERDICTS), default=0)


class _Difference:
    """A paired difference of rewards with its confidence sequence."""

    def __init__(self, rules: GateRules) -> None:
        self._rules = rules
        width = rules.rewards.high - rules.rewards.low
        self._width = width
        self._sequence = BettingSequence(RewardRange(-width, width), rules.alpha)

    def add(self, first: Sequence[float], second: Sequence[float]) -> None:
        """Add the mean of the second rewards minus the mean of the first ones."""
        difference = self._mean(second) - self._mean(first)
        self._sequence.add(max(-self._width, min(self._width, difference)))

    def _mean(self, rewards: Sequence[float]) -> float:
        low, high = self._rules.rewards.low, self._rules.rewards.high
        return sum(max(low, min(high, reward)) for reward in rewards) / len(rewards)

    @property
    def is_acceptable(self) -> bool:
        """Whether the loss is certainly below the margin."""
        return self._margin < self._width and self._sequence.is_above(-self._margin)

    @property
    def is_worse(self) -> bool:
        """Whether the loss is certainly above the margin."""
        return self._margin < self._width and self._sequence.is_below(-self._margin)

    @property
    def _margin(self) -> float:
        return self._rules.margin

    def evidence(self, source: str) -> dict[str, Any]:
        interval = self._sequence.interval()
        return {
            "source": source,
            "pairs": self._sequence.num,
            "difference": None if interval is None else interval.mean,
            "low": None if interval is None else interval.low,
            "high": None if interval is None else interval.high,
            "margin": self._margin,
            "alpha": self._rules.alpha,
        }


class _Evaluation:
    """The evaluation of one candidate against one released version."""

    def __init__(self, candidate: int, released: int, rules: GateRules) -> None:
        self.versions = (candidate, released)
        self.num_draws = 0
        self.verdict: Decision | None = None
        """The decision about the candidate; None while rows must be sampled."""
        self._rules = rules
        self._difference = _Difference(rules)

    @property
    def is_decided(self) -> bool:
        return self.verdict is not None

    def add(self, pair: ScoredPair) -> None:
        self.num_draws += 1
        if pair.released and pair.candidate:
            self._difference.add(pair.released, pair.candidate)
        if self._difference.is_acceptable:
            self.verdict = Decision.RELEASED
        elif self._difference.is_worse:
            self.verdict = Decision.REJECTED
        elif self.num_draws >= self._rules.max_draws:
            self.verdict = Decision.UNDECIDED

    def evidence(self) -> dict[str, Any]:
        figures = self._difference.evidence("held_out")
        return figures | {"draws": self.num_draws, "released": self.versions[1]}


class _LiveTest:
    """The comparison of live sessions: the training arm against the released arm.

    Sessions come in no pairs. As soon as both arms have sessions that are in no pair yet, all of
    them form one: one session of one arm, and the sessions of the other arm since the last pair.
    """

    def __init__(self, rules: GateRules) -> None:
        self._difference = _Difference(rules)
        self._released: list[float] = []
        self._training: list[float] = []
        self._oldest: int | None = None
        self.rejected: int | None = None
        """The oldest version that took part, if the training arm is worse; None otherwise."""

    def add(self, session: ScoredSession) -> None:
        if self.rejected is not None:
            return
        if session.version is None:
            self._released.append(session.mean)
        else:
            self._training.append(session.mean)
            oldest = session.version if self._oldest is None else self._oldest
            self._oldest = min(oldest, session.version)
        if not self._released or not self._training:
            return
        self._difference.add(self._released, self._training)
        self._released.clear()
        self._training.clear()
        if self._difference.is_worse:
            self.rejected = self._oldest

    def evidence(self) -> dict[str, Any]:
        return self._difference.evidence("live")
