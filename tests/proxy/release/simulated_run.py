"""A simulated run: sessions of apps, training steps, a gate, and a server with its history."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from fakevllm.release.actions import (
    Decide,
    Evaluate,
)
from fakevllm.release.controller import (
    GateController,
    GateRules,
    ScoredPair,
    ScoredSession,
)
from fakevllm.statistics.confidence_sequence import RewardRange
from fakevllm_adapters.protocol.releases import GATE, Decision, ReleaseRecord, ReleasesReply

RULES = GateRules(RewardRange(0.0, 1.0))
CANARY_SHARE = 0.2
NUM_SIBLINGS = 4
BATCH_SIZE = 4
"""Sessions of the training arm that make a training step."""
SPREAD = 0.2
"""Difference between the mean reward of easy rows and the overall mean, and between the overall
mean and the mean reward of hard rows."""


@dataclass
class SimulatedServer:
    """The server's part of a simulated run. The server keeps the history. After a rejection, it
    restores the released version as a new version with the same weights. If the version to reject
    is such a copy of the released version, the server rejects the next version that is no copy."""

    means: list[float]
    """True mean reward of each version."""
    records: list[ReleaseRecord] = field(default_factory=list[ReleaseRecord])
    rejected: set[int] = field(default_factory=set[int])
    released: int = 0
    candidate: int | None = None
    is_held: bool = False
    training_limit: int | None = None
    originals: dict[int, int] = field(default_factory=dict[int, int])
    """Maps each restored version to the version whose weights it has."""

    @property
    def newest(self) -> int:
        return len(self.means) - 1

    def history(self) -> ReleasesReply:
        return ReleasesReply(
            records=list(self.records),
            released=self.released,
            candidate=self.candidate,
            rejected=sorted(self.rejected),
            is_held=self.is_held,
            training_limit=self.training_limit,
            released_copies=self._copies_of(self.released),
            newest_copies=self._copies_of(self.newest),
        )

    def decide(self, id: str, decision: Decision, version: int | None, by: str = GATE) -> str:
        """Carry out a decision, unless a request with this id was carried out before. Return the
        reason if the decision is refused, else an empty string."""
        if any(record.id == id for record in self.records):
            return ""
        evidence: dict[str, int] = {}
        if decision in (Decision.RELEASED, Decision.REJECTED) and self.training_limit is not None:
            self.training_limit = min(self.training_limit, self.newest)
        if decision is Decision.CANDIDATE:
            self.candidate = version = self.newest
        elif decision is Decision.RELEASED:
            assert version is not None
            self.released = version
        elif decision is Decision.REJECTED:
            assert version is not None and version > self.released
            version = next(
                (one for one in self._path_from(version) if not self._is_copy(one)), None
            )
            if version is None:
                return "there is nothing to go back from"
            self.rejected |= set(range(version, self.newest + 1))
            self.means.append(self.means[self.released])
            self.originals[self.newest] = self.released
            evidence["restored"] = self.released
            self.candidate = None
        elif decision in (Decision.HOLD, Decision.RESUME):
            self.is_held = decision is Decision.HOLD
        if decision is not Decision.CANDIDATE and version == self.candidate:
            self.candidate = None
        number = len(self.records) + 1
        self.records.append(
            ReleaseRecord(
                number=number,
                id=id,
                decision=decision,
                version=version,
                parent=None,
                time_s=float(number),
                decided_by=by,
                evidence=evidence,
            )
        )
        return ""

    def _path_from(self, version: int) -> range:
        return range(version, self.newest + 1)

    def _is_copy(self, version: int) -> bool:
        """Return True if a version has the weights of the released version."""
        return self._original(version) == self._original(self.released)

    def _copies_of(self, version: int) -> list[int]:
        original = self._original(version)
        return [one for one in range(len(self.means)) if self._original(one) == original]

    def _original(self, version: int) -> int:
        while version in self.originals:
            version = self.originals[version]
        return version


class SimulatedRun:
    """One run. `next_mean` is a function from the true mean reward of a version to the true mean
    reward of the next version."""

    def __init__(
        self,
        seed: int,
        mean: float,
        next_mean: Callable[[float], float] = lambda mean: mean,
        rules: GateRules = RULES,
    ) -> None:
        self.random = random.Random(seed)
        self.rules = rules
        self.server = SimulatedServer([mean])
        self.gate = GateController(rules)
        self.gate.history_read(self.server.history())
        self.next_mean = next_mean
        self.num_sessions = 0
        self.num_bad = 0
        """Number of sessions that a bad version answered. The mean reward of a bad version is below
        the first mean of the run by more than the margin."""
        self._num_waiting = 0
        self._lowest_good = mean - rules.margin

    def session(self) -> None:
        """Simulate one session of an app. Then let the gate carry out its due decisions, and
        evaluate at most one row."""
        self.num_sessions += 1
        is_training = self.random.random() < CANARY_SHARE
        server = self.server
        version = server.newest if is_training else server.released
        mean = server.means[version]
        self.num_bad += mean < self._lowest_good - 1e-9
        rewards = self._rewards(mean, self._spread(), NUM_SIBLINGS)
        outcome = ScoredSession(version if is_training else None, sum(rewards) / NUM_SIBLINGS)
        self.gate.session_scored(outcome)
        if is_training:
            self._train()
        self._let_gate_act()

    def _train(self) -> None:
        self._num_waiting += 1
        if self._num_waiting == BATCH_SIZE:
            self._num_waiting = 0
            self.server.means.append(self.next_mean(self.server.means[-1]))
            self.gate.version_published(self.server.newest)

    def _let_gate_act(self) -> None:
        action = self.gate.next_action()
        if isinstance(action, Evaluate):
            spread = self._spread()
            pair = ScoredPair(
                *(
                    self._rewards(self.server.means[version], spread, self.rules.num_samples)
                    for version in (action.released, action.candidate)
                )
            )
            self.gate.pair_scored(action.candidate, action.released, action.draw, pair)
            action = self.gate.next_action()
        if isinstance(action, Decide):
            is_refused = self.server.decide(action.id, action.decision, action.version)
            self.gate.history_read(self.server.history())
            if is_refused:
                self.gate.decision_refused(action)
            self.gate.version_published(self.server.newest)

    def _spread(self) -> float:
        return self.random.choice((-SPREAD, SPREAD))

    def _rewards(self, mean: float, spread: float, num: int) -> list[float]:
        return [float(self.random.random() < mean + spread) for _ in range(num)]

    @property
    def decisions(self) -> list[Decision]:
        return [record.decision for record in self.server.records]
