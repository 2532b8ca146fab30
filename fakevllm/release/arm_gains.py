"""Estimate two gains in reward from live sessions. The policy's gain is the gain by training. The
choice's gain is the gain by serving the best sibling of each request. Siblings are the answers that
are sampled for one request.

* The policy's gain is the mean reward of the siblings in the training arm (sessions that the newest
  weights answer), minus the mean reward of the siblings in the baseline arm (sessions that one
  fixed version answers).
* The choice's gain is the reward of the served sibling, minus the mean reward of all siblings of
  the same request. The choice's gain is measured in the training arm.

A session is one observation, because its turns are not independent. The value of the observation is
the mean over the session's groups (requests with their siblings). A session is counted once, when
it has had no group for SESSION_IDLE_S seconds. Later groups of the session do not count. An
observation therefore never changes after it was counted, and the confidence intervals hold at all
times (see `statistics`).

Live sessions do not come in pairs, so the sessions are paired here. As soon as both arms have
sessions without a pair, all these sessions form one pair. One part of the pair is a single session
of one arm. The other part consists of the other arm's sessions since the last pair.

The arms are drawn without regard to rewards. But the order in which sessions are counted depends on
how long the sessions last, and their length may depend on the weights. The intervals are therefore
only approximate if the mean reward and the length of sessions both change over time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fakevllm.release.arms import Arm
from fakevllm.statistics.confidence_sequence import (
    ALPHA,
    ConfidenceSequence,
    DifferenceSequence,
    Interval,
    RewardRange,
)

SESSION_IDLE_S = 600.0
"""Seconds without a group after which a session is counted. Most conversations are over then."""
MAX_OPEN_SESSIONS = 20_000
"""Maximum number of sessions that are not counted yet. If there are more, the session that has had
no group for the longest time is counted."""
MAX_UNPAIRED = 10_000
"""Maximum number of sessions in one part of a pair. Further sessions are in no pair."""
MAX_COUNTED_SESSIONS = 100_000
"""Maximum number of counted sessions that are remembered (about 15 MB). Later groups of a
remembered session are not counted."""


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """The rewards of one group (a request whose sampled answers were scored). The object also has
    the group's time and its arm, which decides which weights answer the request."""

    root: str
    """Root of the session's tree."""
    arm: Arm
    received_at: float
    """Time at which the request arrived, in Unix seconds."""
    mean: float
    """Mean reward of the siblings. A first sibling that was sampled greedily is left out."""
    served: float | None
    """Reward of the served sibling; None if the served sibling has no reward."""
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class Gain:
    """An estimated gain in reward, with its confidence interval."""

    mean: float
    low: float | None
    """Low end of the interval; None if a reward was outside of the declared range."""
    high: float | None
    num: int
    """Number of observations: pairs of sessions for the policy's gain, sessions for the choice's
    gain."""


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """The sessions of each arm, the gain in reward by training, and the gain in reward by choosing
    the best sibling (sampled answer) of a request.

    An arm decides which weights answer a session.
    """

    sessions: Mapping[Arm, int]
    """Number of counted sessions by arm, for the arms that have any."""
    means: Mapping[Arm, float]
    """By arm: the mean of the mean rewards of the counted sessions."""
    num_open: int
    """Number of sessions that are not counted yet."""
    policy: Gain | None
    choice: Gain | None
    outside: float | None
    """A reward outside of the declared range; None if there was none."""


@dataclass(slots=True)
class _OpenSession:
    arm: Arm
    last_at: float
    num: int = 0
    mean_sum: float = 0.0
    num_served: int = 0
    gain_sum: float = 0.0

    def add(self, group: GroupOutcome) -> None:
        self.last_at = max(self.last_at, group.received_at)
        self.num += 1
        self.mean_sum += group.mean
        if group.served is not None:
            self.num_served += 1
            self.gain_sum += group.served - group.mean


@dataclass(slots=True)
class _ArmTotals:
    num: int = 0
    total: float = 0.0
    unpaired: list[float] = field(default_factory=list[float])
    """Means of the sessions since the last pair."""


class ArmGains:
    """Estimates two gains in reward from the groups of one proxy: the gain by training, and the
    gain by choosing the best sibling. A group is a request with its siblings (sampled answers). If
    the order in which the proxy received the requests is known, add their groups in this order."""

    def __init__(
        self,
        rewards: RewardRange,
        *,
        first: Arm = Arm.BASELINE,
        second: Arm = Arm.TRAINING,
        alpha: float = ALPHA,
    ) -> None:
        """Create the object without sessions. `rewards` is the range of a single reward. The gain
        by training is the mean reward of the arm `second` minus the mean reward of the arm `first`.
        """
        self._rewards = rewards
        self._first, self._second = first, second
        self._open: OrderedDict[str, _OpenSession] = OrderedDict()
        """Sessions by root. The session that has had no group for the longest time comes first."""
        self._counted: OrderedDict[str, None] = OrderedDict()
        self._totals: dict[Arm, _ArmTotals] = {}
        self._policy = DifferenceSequence(rewards, alpha)
        # The served reward minus the mean is between -width and width.
        self._choice = ConfidenceSequence(rewards.high - rewards.low, alpha)
        self._outside: float | None = None

    def add(self, group: GroupOutcome) -> None:
        """Add a group to its session. Leave the group out if the session was counted already. Also
        leave the group out if the earlier groups of the session belong to another arm."""
        self._count_idle(group.received_at)
        for reward in (group.lowest, group.highest):
            if not self._rewards.low <= reward <= self._rewards.high:
                self._outside = reward
        if group.root in self._counted:
            return
        session = self._open.get(group.root)
        if session is not None and session.arm is not group.arm:
            return  # the shares were changed in the middle of the session
        if session is None:
            session = self._open[group.root] = _OpenSession(group.arm, group.received_at)
        session.add(group)
        self._open.move_to_end(group.root)
        while len(self._open) > MAX_OPEN_SESSIONS:
            self._count_oldest()

    def add_all(self, groups: Iterable[GroupOutcome]) -> None:
        for group in groups:
            self.add(group)

    def summary(self, now: float) -> ArmSummary:
        """Return the sessions and the gains at the time `now`, in Unix seconds.

        Sessions that have been idle for long enough at this time are counted first.
        """
        self._count_idle(now)
        sessions = {arm: totals.num for arm, totals in self._totals.items()}
        width = self._rewards.high - self._rewards.low
        return ArmSummary(
            sessions,
            {arm: totals.total / totals.num for arm, totals in self._totals.items()},
            len(self._open),
            self._gain(self._policy.interval(), self._policy.num, width),
            self._gain(self._choice.interval(), self._choice.num, width),
            self._outside,
        )

    def _gain(self, interval: Interval | None, num: int, width: float) -> Gain | None:
        if interval is None:
            return None
        if self._outside is not None:
            return Gain(interval.mean, None, None, num)
        limited = interval.within(-width, width)
        return Gain(limited.mean, limited.low, limited.high, num)

    def _count_idle(self, now: float) -> None:
        while self._open:
            oldest = next(iter(self._open.values()))
            if now - oldest.last_at < SESSION_IDLE_S:
                return
            self._count_oldest()

    def _count_oldest(self) -> None:
        root, session = self._open.popitem(last=False)
        self._counted[root] = None
        if len(self._counted) > MAX_COUNTED_SESSIONS:
            self._counted.popitem(last=False)
        mean = session.mean_sum / session.num
        totals = self._totals.setdefault(session.arm, _ArmTotals())
        totals.num += 1
        totals.total += mean
        if session.arm is self._second and session.num_served:
            self._choice.add(session.gain_sum / session.num_served)
        if session.arm in (self._first, self._second):
            if len(totals.unpaired) < MAX_UNPAIRED:
                totals.unpaired.append(mean)
            self._pair()

    def _pair(self) -> None:
        first, second = self._totals.get(self._first), self._totals.get(self._second)
        if first is None or second is None or not first.unpaired or not second.unpaired:
            return
        self._policy.add(first.unpaired, second.unpaired)
        first.unpaired.clear()
        second.unpaired.clear()
