"""Make the release gate's decisions. The controller decides which version becomes a candidate (the
version to evaluate), and when the candidate is released, rejected or left undecided. This module
does no I/O, and has no clock.

The decisions depend only on this input:

* the server's history of releases
* the newest version
* the scored pairs of the candidate's evaluation (the rewards of two versions for one held-out row),
  in the order in which the rows were drawn
* the sessions that were scored since the latest verdict

`next_action` returns the action that is due. A decision stays due until the history contains the
decision. Therefore the process may die at any time, and a decision may be sent twice, without harm.

A verdict is the decision that a version is released, rejected or left undecided. Each verdict ends
a cycle. Two tests run during each cycle.

* Held-out rows: the candidate and the released version answer the same rows. The mean of the paired
  differences (candidate minus released version) has the confidence interval (low, high). The
  candidate is released if low > -margin, and rejected if high < -margin.
* Live sessions: the sessions of the training arm, which the newest version answers, are compared
  with those of the released arm, which the released version answers. This test judges the mean over
  all versions since the latest verdict, and not the candidate alone. The test can reject versions,
  and cannot release a version.

Suppose that no version is worse than the released version by more than `margin`. Each test then
rejects a version with a probability of at most alpha / 2, even if its result is read after every
observation. The probability that at least one of the two tests rejects a version is at most alpha.
The bound covers only one comparison of live sessions. A new comparison begins with each new
GateController object, after each rejection that the server has refused, and with each change of the
hooks.

The bounds hold only for rewards in their declared range. After a reward outside of the range,
nothing is evaluated and no version is released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fakevllm.release.actions import HELD_OUT, LIVE, Action, Decide, Evaluate, Wait
from fakevllm.statistics.betting_sequence import BettingSequence, BettingTest
from fakevllm.statistics.confidence_sequence import RewardRange
from fakevllm_adapters.protocol.releases import GATE, Decision, ReleasesReply

_VERDICTS = (Decision.RELEASED, Decision.REJECTED, Decision.UNDECIDED)


@dataclass(frozen=True, slots=True)
class GateRules:
    """The settings of the release gate. The gate decides which version of the weights apps get."""

    rewards: RewardRange
    """Range of a single reward. A reward outside of the range counts as the nearest end of the
    range. After such a reward, no version is released."""
    num_samples: int = 4
    """Number of answers that each of the two versions samples for a held-out row."""
    evaluate_every: int = 20
    """Number of new versions after which the newest version becomes a candidate."""
    margin: float = 0.05
    """Largest acceptable loss of mean reward, compared with the released version."""
    alpha: float = 0.05
    """Maximum probability with which an acceptable candidate is rejected."""
    max_samples: int = 2000
    """Number of the candidate's samples after which the candidate is left undecided."""

    @property
    def max_draws(self) -> int:
        """Maximum number of held-out rows that are drawn for one candidate."""
        return max(1, self.max_samples // self.num_samples)


@dataclass(frozen=True, slots=True)
class ScoredPair:
    """The rewards of the candidate (the version that is evaluated) and of the released version for
    one held-out row. Each list has one reward per sample, without the samples that got no reward.

    If one list is shorter than the other list, its missing rewards count against the candidate. A
    missing reward of the candidate counts as the lowest possible reward. A missing reward of the
    released version counts as the highest possible reward. If neither version has a reward, the row
    is counted as drawn, but is not compared.
    """

    released: Sequence[float]
    candidate: Sequence[float]


@dataclass(frozen=True, slots=True)
class ScoredSession:
    """The outcome of one session (a conversation of an app): the mean reward of one of its
    requests. The session's other requests are not used, because they are not independent of this
    request."""

    version: int | None
    """Version that answered a session of the training arm; None for the released arm."""
    mean: float
    """Mean reward of the session's siblings."""


class GateController:
    """The decision maker of one proxy's release gate. It makes the decisions about the versions of
    one training run."""

    def __init__(self, rules: GateRules) -> None:
        self._rules = rules
        self._history: ReleasesReply | None = None
        self._newest = 0
        self._evaluation: _Evaluation | None = None
        self._live = _LiveTest(rules)
        self._scorer = ""
        self._outside: float | None = None
        self._unusable: str | None = None

    def history_read(self, history: ReleasesReply) -> None:
        """Replace the known history of releases by `history`, the server's present history."""
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
        self._live.candidate = history.candidate

    def version_published(self, version: int) -> None:
        """Record that `version` is the newest version of the weights, and is served now."""
        self._newest = version

    def scorer_changed(self, scorer: str) -> None:
        """Record which hook scores the rows. After a change of the hook, the evaluation begins
        again with its first row, and the comparison of live sessions also begins again. The reason
        is that rewards of two hooks cannot be compared. Evaluations and releases that were stopped
        by a reward outside of the declared range can then continue."""
        if scorer != self._scorer and self._evaluation is not None:
            self._evaluation = _Evaluation(*self._evaluation.versions, self._rules)
        if self._scorer and scorer != self._scorer:
            self._begin_live_again()
            self._outside = None
        self._scorer = scorer

    def rewards_seen(self, *rewards: float) -> None:
        """Record rewards of groups or rows. A reward outside of the declared range stops all
        evaluations and releases."""
        low, high = self._rules.rewards.low, self._rules.rewards.high
        for reward in rewards:
            if self._outside is None and not low <= reward <= high:
                self._outside = reward

    def rows_unusable(self, reason: str) -> None:
        """Record `reason`, the reason why the held-out rows cannot be used for an evaluation. From
        then on, no version is evaluated or released. Live sessions can still reject a version."""
        self._unusable = reason

    def give_up(self, candidate: int, reason: str) -> None:
        """End the evaluation of a candidate (the version to evaluate) whose answers cannot be
        sampled. The candidate is then left undecided."""
        evaluation = self._evaluation
        if evaluation is not None and evaluation.versions[0] == candidate:
            evaluation.give_up(reason)

    def pair_scored(self, candidate: int, released: int, draw: int, pair: ScoredPair) -> None:
        """Add the rewards of the evaluation's next row, which both the candidate and the released
        version have answered. `draw` is the number of the row in the random order. The call is
        ignored if the row belongs to another evaluation, or is not the next one in this order."""
        evaluation = self._evaluation
        if evaluation is None or evaluation.versions != (candidate, released):
            return
        if draw == evaluation.num_draws and not evaluation.is_decided:
            self.rewards_seen(*pair.released, *pair.candidate)
            evaluation.add(pair)

    def decision_refused(self, decision: Decide) -> None:
        """Record that the server has refused a decision. If the decision rejected a version because
        of its rewards in apps' sessions, the comparison of these rewards begins again. Any other
        decision stays due, so it is sent again."""
        if decision.source == LIVE:
            self._begin_live_again()

    def session_scored(self, session: ScoredSession) -> None:
        """Add a session that was scored since the latest verdict (the decision that a version is
        released, rejected or left undecided). A session that the released version answered always
        counts. Any other session counts only if its version is newer than all versions with a
        verdict."""
        if session.version is None or session.version > self._base:
            self._live.add(session)

    def next_action(self) -> Action:
        """Return the release gate's action that is due now: evaluate a version of the weights, send
        a decision about a version, or wait."""
        history, evaluation = self._history, self._evaluation
        if history is None:
            return Wait()
        if (worse := self._live.rejected) is not None:
            evidence = self._live.evidence() | {"released": history.released}
            return self._decide(Decision.REJECTED, worse, evidence)
        if evaluation is not None:
            return self._next_of(evaluation, history)
        if self._is_stopped:
            return Wait()
        is_due = self._newest - self._base >= self._rules.evaluate_every
        if is_due and not history.is_held:
            return Decide(self._id(None, Decision.CANDIDATE), Decision.CANDIDATE, version=None)
        return Wait()

    @property
    def trouble(self) -> str | None:
        """Reason why no version is evaluated or released, and the remedy. None if there is no
        trouble."""
        if self._outside is None:
            return self._unusable
        rewards = self._rules.rewards
        return (
            f"the hook returned the reward {self._outside:g}, outside of release.reward_range, "
            f"from {rewards.low:g} to {rewards.high:g}: set it to the range of your hook's "
            "rewards, and restart the proxy"
        )

    @property
    def _is_stopped(self) -> bool:
        """Whether evaluations and releases have stopped."""
        return self._outside is not None or self._unusable is not None

    @property
    def latest_verdict(self) -> int:
        """Number of the latest verdict in the history; 0 if there is none. A verdict is the
        decision that a version is released, rejected or left undecided. A new comparison of live
        sessions begins with each verdict."""
        return self._verdict_number(self._history)

    @property
    def next_candidate(self) -> int | None:
        """Lowest version number that the next candidate (the version to evaluate) can have. If
        training makes newer versions before the next evaluation begins, the newest of them becomes
        the candidate. The value is None while a version is being evaluated, while releases are on
        hold or stopped, and before the history is known."""
        is_held = self._history is None or self._history.is_held
        if is_held or self._evaluation is not None or self._is_stopped:
            return None
        return self._base + self._rules.evaluate_every

    @property
    def num_pairs(self) -> int:
        """Number of held-out rows that are compared so far in the current evaluation. The number is
        0 if no version is being evaluated."""
        return 0 if self._evaluation is None else self._evaluation.num_pairs

    @property
    def progress(self) -> dict[str, Any]:
        """The figures of the current evaluation; {} if no version is being evaluated. The first
        access after a new row was scored computes the confidence interval, which may take 50 ms."""
        return {} if self._evaluation is None else self._evaluation.evidence()

    def _begin_live_again(self) -> None:
        candidate = self._live.candidate
        self._live = _LiveTest(self._rules)
        self._live.candidate = candidate

    def _next_of(self, evaluation: _Evaluation, history: ReleasesReply) -> Action:
        """Return what the release gate must do now for `evaluation`, the evaluation of the present
        candidate: sample the next row, send the verdict, or wait."""
        candidate, released = evaluation.versions
        verdict = evaluation.verdict
        if verdict is None:
            if self._is_stopped:
                return Wait()
            return Evaluate(candidate, released, evaluation.num_draws)
        if verdict is Decision.RELEASED and (history.is_held or self._is_stopped):
            return Wait()
        return self._decide(verdict, candidate, evaluation.evidence())

    def _decide(self, decision: Decision, version: int, evidence: dict[str, Any]) -> Decide:
        return Decide(self._id(version, decision), decision, version, evidence)

    def _id(self, version: int | None, decision: Decision) -> str:
        assert self._history is not None, "a decision follows from a history"
        records = self._history.records
        last = records[-1].number if records else 0
        named = "" if version is None else f"{version}-"
        return f"{GATE}-{named}{decision}-{last}"

    @property
    def _base(self) -> int:
        """The newest version that had a verdict: it was released, rejected or left undecided.
        Versions that descend from a rejected version were rejected with it, and count too."""
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
        """Return the number of the latest verdict in a history. Return 0 if there was no
        verdict."""
        records = [] if history is None else history.records
        return max((one.number for one in records if one.decision in _VERDICTS), default=0)


class _Difference:
    """The difference between two mean rewards (second minus first). It is estimated from pairs of
    observations, with a confidence sequence."""

    def __init__(self, rules: GateRules) -> None:
        self._rules = rules
        width = rules.rewards.high - rules.rewards.low
        differences = RewardRange(-width, width)
        self._width = width
        self._sequence = BettingSequence(differences, rules.alpha)
        self._test: BettingTest | None = None
        """Test whether the loss is above or below the margin. None if the margin is at least as
        large as the whole range of rewards. In this case, nothing is decided."""
        if rules.margin < width:
            self._test = BettingTest(differences, -rules.margin, rules.alpha)

    def add(self, first: float, second: float) -> None:
        """Add one pair of mean rewards, one from each side of the comparison. The pair's difference
        is `second - first`. Both means must be in the declared range of rewards."""
        difference = max(-self._width, min(self._width, second - first))
        self._sequence.add(difference)
        if self._test is not None:
            self._test.add(difference)

    @property
    def num_pairs(self) -> int:
        return self._sequence.num

    @property
    def is_acceptable(self) -> bool:
        """Whether the test has already shown that the second mean reward is above the first one
        minus `margin` (the largest acceptable loss)."""
        return self._test is not None and self._test.is_above

    @property
    def is_worse(self) -> bool:
        """Whether the test has already shown that the second mean reward is lower than the first
        one by more than `margin`, the largest acceptable loss."""
        return self._test is not None and self._test.is_below

    def evidence(self, source: str) -> dict[str, Any]:
        interval = self._sequence.interval()
        return {
            "source": source,
            "pairs": self._sequence.num,
            "difference": None if interval is None else interval.mean,
            "low": None if interval is None else interval.low,
            "high": None if interval is None else interval.high,
            "margin": self._rules.margin,
            "alpha": self._rules.alpha,
        }


class _Evaluation:
    """The evaluation of one candidate against one released version."""

    def __init__(self, candidate: int, released: int, rules: GateRules) -> None:
        self.versions = (candidate, released)
        self.num_draws = 0
        self.verdict: Decision | None = None
        """The decision about the candidate; None while more rows must be sampled."""
        self._rules = rules
        self._difference = _Difference(rules)
        self._trouble: str | None = None
        """Reason why the evaluation ended early."""

    @property
    def num_pairs(self) -> int:
        return self._difference.num_pairs

    @property
    def is_decided(self) -> bool:
        return self.verdict is not None

    def add(self, pair: ScoredPair) -> None:
        self.num_draws += 1
        most = max(len(pair.released), len(pair.candidate))
        if most > 0:
            low, high = self._rules.rewards.low, self._rules.rewards.high
            self._difference.add(
                self._mean(pair.released, most, high), self._mean(pair.candidate, most, low)
            )
        if self._difference.is_acceptable:
            self.verdict = Decision.RELEASED
        elif self._difference.is_worse:
            self.verdict = Decision.REJECTED
        elif self.num_draws >= self._rules.max_draws:
            self.verdict = Decision.UNDECIDED

    def give_up(self, reason: str) -> None:
        if self.verdict is None:
            self.verdict, self._trouble = Decision.UNDECIDED, reason

    def _mean(self, rewards: Sequence[float], num: int, missing: float) -> float:
        """Return the mean of `num` rewards. If `rewards` has fewer than `num` items, each missing
        reward counts as `missing`. A reward outside of the declared range counts as the nearer end
        of the range."""
        known = sum(_clipped(reward, self._rules) for reward in rewards)
        return (known + (num - len(rewards)) * missing) / num

    def evidence(self) -> dict[str, Any]:
        figures = self._difference.evidence(HELD_OUT)
        figures |= {"draws": self.num_draws, "released": self.versions[1]}
        return figures if self._trouble is None else figures | {"trouble": self._trouble}


@dataclass(slots=True)
class _Sum:
    """The sum of some numbers, and the count of these numbers."""

    num: int = 0
    total: float = 0.0

    def add(self, number: float, num: int = 1) -> None:
        self.total += number
        self.num += num

    @property
    def mean(self) -> float:
        return self.total / self.num


class _LiveTest:
    """The comparison of live sessions between the training arm (the sessions that the newest
    version answers) and the released arm (the sessions that the released version answers).

    Sessions do not come in pairs. Therefore sessions are collected until each arm has at least one.
    The mean rewards of the two arms' collected sessions then form one pair, and a new collection
    begins. One of the two arms always has exactly one session in a pair.

    Sessions are added in the order in which their first groups end. The arm of a session is drawn
    without regard to rewards. However, a session with a long answer is added late. Its pair may
    therefore depend on its reward, so the pairs are not quite independent of rewards.
    """

    def __init__(self, rules: GateRules) -> None:
        self.candidate: int | None = None
        """Version that is being evaluated on held-out rows; None if there is no such version."""
        self.rejected: int | None = None
        """Version to reject, if the training arm is worse; None otherwise."""
        self._rules = rules
        self._difference = _Difference(rules)
        self._released = _Sum()
        """Sessions of the released arm since the last pair."""
        self._older, self._newer = _Sum(), _Sum()
        """Sums over the sessions of the training arm since the last pair. Sessions whose version is
        newer than the candidate are in `_newer`, and all others in `_older`."""
        self._older_differences = _Sum()
        """Sum over the sessions that were in `_older`: the mean reward of each session, minus the
        mean reward of the released arm in the session's pair."""
        self._oldest: int | None = None
        self._oldest_newer: int | None = None
        """The oldest of the versions that took part in the comparison and are newer than the
        candidate."""

    def add(self, session: ScoredSession) -> None:
        if self.rejected is not None:
            return
        mean = _clipped(session.mean, self._rules)
        if session.version is None:
            self._released.add(mean)
        else:
            self._oldest = _older(self._oldest, session.version)
            if self.candidate is not None and session.version > self.candidate:
                self._newer.add(mean)
                self._oldest_newer = _older(self._oldest_newer, session.version)
            else:
                self._older.add(mean)
        if self._released.num and (self._older.num or self._newer.num):
            self._pair()

    def _pair(self) -> None:
        released, older, newer = self._released.mean, self._older, self._newer
        training = (older.total + newer.total) / (older.num + newer.num)
        self._difference.add(released, training)
        self._older_differences.add(older.total - older.num * released, older.num)
        self._released, self._older, self._newer = _Sum(), _Sum(), _Sum()
        if self._difference.is_worse:
            self.rejected = self._first_worse()

    def _first_worse(self) -> int | None:
        """Return the version to reject. It is usually the oldest version in the comparison. If the
        mean loss of the candidate and the older versions is at most the margin, it is the oldest
        version that is newer than the candidate, if there is one."""
        differences = self._older_differences
        if differences.num and differences.mean >= -self._rules.margin:
            return self._oldest if self._oldest_newer is None else self._oldest_newer
        return self._oldest

    def evidence(self) -> dict[str, Any]:
        return self._difference.evidence(LIVE)


def _clipped(reward: float, rules: GateRules) -> float:
    return max(rules.rewards.low, min(rules.rewards.high, reward))


def _older(one: int | None, other: int) -> int:
    return other if one is None else min(one, other)
