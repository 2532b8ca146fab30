"""Compare the rewards of two versions of the hooks for the same answers. This module does no I/O.

A group is a request with the answers (siblings) that were sampled for it. Only the differences
between the rewards of one group train the model. Therefore most figures count groups:

* groups with a signal (two different rewards)
* groups in which the order of the answers by reward changes
* groups in which another answer would have been served
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fakevllm.rescoring.reward_noise import RewardNoise

Rewards = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class RescoredGroup:
    """The old and the new rewards of one group, in the order of its siblings. A reward is None if
    the hook gave the sibling no reward."""

    group_id: str
    old: Rewards
    new: Rewards | None
    """Rewards of the new hooks; None if the new hooks failed."""
    reason: str | None = None
    """Reason why the new hooks failed; None if they did not fail."""
    served: int | None = None
    """Position of the sibling that the app got because its old reward was the highest. None if the
    app got another answer."""
    greedy: int | None = None
    """Position of the sibling that was sampled at temperature 0; None if there is no such sibling.
    The reward of this sibling is left out of estimates of the model's mean reward."""
    is_known: bool = False
    """Whether an earlier command has computed the new rewards."""
    lacks_task: bool = False
    """Whether the group belongs to a dataset task that is unknown. Hooks get no metadata of such a
    task."""
    answers: Sequence[Hashable] = ()
    """The answers in a canonical form, in which equal answers compare as equal. Empty if the
    answers are unknown."""


@dataclass(slots=True)
class Correlation:
    """Pearson's correlation of pairs that are added one by one. The sums of squares are updated
    with each pair (Welford's algorithm), so that rounding errors do not grow.

    >>> pairs = Correlation()
    >>> for pair in [(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]: pairs.add(*pair)
    >>> round(pairs.value, 6)
    1.0
    """

    num: int = 0
    _mean_x: float = 0.0
    _mean_y: float = 0.0
    _xx: float = 0.0
    _yy: float = 0.0
    _xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.num += 1
        dx, dy = x - self._mean_x, y - self._mean_y
        self._mean_x += dx / self.num
        self._mean_y += dy / self.num
        self._xx += dx * (x - self._mean_x)
        self._yy += dy * (y - self._mean_y)
        self._xy += dx * (y - self._mean_y)

    @property
    def value(self) -> float | None:
        """Pearson's correlation of the pairs that were added. None if all first numbers of the
        pairs, or all second numbers, are equal."""
        if self._xx <= 0 or self._yy <= 0:
            return None
        return max(-1.0, min(1.0, self._xy / math.sqrt(self._xx * self._yy)))


@dataclass(slots=True)
class _Mean:
    num: int = 0
    total: float = 0.0

    def add(self, value: float) -> None:
        self.num += 1
        self.total += value

    @property
    def value(self) -> float | None:
        return self.total / self.num if self.num else None


@dataclass(slots=True)
class HookMeans:
    """Figures of the rewards that one version of the hooks gave in the compared groups."""

    _all: _Mean = field(default_factory=_Mean)
    _best: _Mean = field(default_factory=_Mean)
    num_with_signal: int = 0
    """Number of groups with at least two different rewards. Other groups do not train the model."""
    num_tied: int = 0
    """Number of groups in which several siblings share the highest reward, so that no sibling is
    the only best one."""

    def add(self, rewards: Sequence[float], greedy: int | None) -> None:
        """Add to the figures the rewards of one group (a request with its answers). `greedy` is the
        position of the sibling (answer) that was sampled at temperature 0."""
        for position, reward in enumerate(rewards):
            if position != greedy:
                self._all.add(reward)
        best = max(rewards)
        self._best.add(best)
        self.num_tied += list(rewards).count(best) > 1

    @property
    def mean(self) -> float | None:
        """Mean reward of all siblings that were not sampled at temperature 0. This mean is an
        estimate of the model's expected reward."""
        return self._all.value

    @property
    def best(self) -> float | None:
        """The highest reward of each group, averaged over the groups. An app that is always served
        the best sibling gets this mean reward."""
        return self._best.value


class HookComparison:
    """The comparison of new hooks with the rewards in the ledger (the proxy's database). The
    rewards of a group are the rewards of the answers that were sampled for one request.

    The means, the correlations and the counts of changed groups cover the groups that have both old
    rewards (from the ledger) and new rewards. Groups without an old reward are only counted.

    >>> comparison = HookComparison()
    >>> comparison.add(RescoredGroup("g1", old=[0.0, 1.0], new=[1.0, 0.0], served=1))
    >>> comparison.num_reordered, comparison.num_served_otherwise
    (1, 1)
    """

    def __init__(self) -> None:
        self.old, self.new = HookMeans(), HookMeans()
        self.num_groups = 0
        """Number of groups that the new hooks were called for."""
        self.failures: Counter[str] = Counter()
        """Number of groups for which the new hooks failed, by the slug of the reason."""
        self.first_failure: str | None = None
        """Reason of the first failure of the new hooks, with its detail."""
        self.num_new_failures = 0
        """Number of groups with an old reward for which the new hooks failed."""
        self.first_new_failure: RescoredGroup | None = None
        """The first group with an old reward for which the new hooks failed."""
        self.num_known = 0
        """Number of groups that an earlier command with the same hooks has scored."""
        self.num_without_task = 0
        """Number of groups that belong to an unknown dataset task."""
        self.num_without_old = 0
        """Number of groups without an old reward."""
        self.num_compared = 0
        self.num_siblings = 0
        """Number of siblings with both an old and a new reward."""
        self.num_reordered = 0
        """Number of groups in which the order of at least two siblings by reward is reversed."""
        self.num_gained = 0
        """Number of groups that have a signal (two different rewards) only with the new hooks."""
        self.num_lost = 0
        """Number of groups that have a signal (two different rewards) only with the old rewards."""
        self.num_served = 0
        """Number of compared groups in which the app got the sibling with the highest old reward.
        """
        self.num_served_otherwise = 0
        """Number of groups in which the served sibling had the highest old reward, and another
        sibling has a higher new reward."""
        self._overall, self._within = Correlation(), Correlation()
        self._noise = RewardNoise()

    @property
    def correlation(self) -> float | None:
        """Correlation of the old and the new rewards over all siblings (the answers sampled for
        each request). None if all old rewards or all new rewards are equal."""
        return self._overall.value

    @property
    def correlation_within(self) -> float | None:
        """Correlation of the old and the new rewards within groups. The mean reward of each group
        is first subtracted from the rewards of the group. Only these differences from the mean
        train the model."""
        return self._within.value

    @property
    def noise_share(self) -> float | None:
        """Share of noise in the variance of the new rewards within groups. Rewards are noisy if
        equal answers get different rewards. None if no group has two equal answers, or if all
        rewards of each group are equal."""
        return self._noise.share

    @property
    def correlation_without_noise(self) -> float | None:
        """Estimate of the value that `correlation_within` would have if the new rewards had no
        noise. Rewards are noisy if equal answers of a group get different rewards. Training
        averages this noise out. None if no estimate is possible."""
        return self._noise.without_noise(self.correlation_within)

    def add(self, group: RescoredGroup) -> None:
        """Add the old and the new rewards of one group to the comparison."""
        self.num_groups += 1
        self.num_known += group.is_known
        self.num_without_task += group.lacks_task
        has_old = any(reward is not None for reward in group.old)
        if group.new is None:
            if has_old:
                self.num_new_failures += 1
                self.first_new_failure = self.first_new_failure or group
            self.failures[(group.reason or "unknown").partition(":")[0]] += 1
            self.first_failure = self.first_failure or group.reason
            return
        if not has_old:
            self.num_without_old += 1
            return
        self.num_compared += 1
        self._add_signal(has_signal(group.old), has_signal(group.new))
        self._add_served(group.new, group.served)
        both = zip(group.old, group.new, strict=True)
        pairs = [
            (i, before, after)
            for i, (before, after) in enumerate(both)
            if before is not None and after is not None
        ]
        if pairs:
            positions, old, new = ([*column] for column in zip(*pairs, strict=True))
            greedy = positions.index(group.greedy) if group.greedy in positions else None
            self._add_rewards(old, new, greedy)
            if group.answers:
                self._noise.add([group.answers[position] for position in positions], new)

    def _add_signal(self, had_signal: bool, has_new_signal: bool) -> None:
        self.old.num_with_signal += had_signal
        self.new.num_with_signal += has_new_signal
        self.num_gained += has_new_signal and not had_signal
        self.num_lost += had_signal and not has_new_signal

    def _add_rewards(self, old: list[float], new: list[float], greedy: int | None) -> None:
        self.old.add(old, greedy)
        self.new.add(new, greedy)
        self.num_siblings += len(old)
        pairs = list(zip(old, new, strict=True))
        self.num_reordered += any(
            (old_1 - old_2) * (new_1 - new_2) < 0
            for (old_1, new_1), (old_2, new_2) in itertools.combinations(pairs, 2)
        )
        within = zip(_deviations(old), _deviations(new), strict=True)
        for pair, deviations in zip(pairs, within, strict=True):
            self._overall.add(*pair)
            self._within.add(*deviations)

    def _add_served(self, new: Rewards, served: int | None) -> None:
        if served is None or all(reward is None for reward in new):
            return
        own = new[served]
        self.num_served += 1
        self.num_served_otherwise += any(
            other is not None and (own is None or other > own) for other in new
        )

    def as_json(self) -> dict[str, Any]:
        """Return all figures of this comparison of old and new rewards as a JSON object."""
        names = (
            *("num_groups", "num_known", "num_without_task", "num_compared", "num_without_old"),
            *(
                "num_siblings",
                "num_reordered",
                "num_gained",
                "num_lost",
                "num_served",
                "num_served_otherwise",
            ),
            *("correlation", "correlation_within", "noise_share", "correlation_without_noise"),
            "first_failure",
        )
        return {
            **{name: getattr(self, name) for name in names},
            "failures": dict(self.failures),
            "old": _means_json(self.old),
            "new": _means_json(self.new),
        }


def has_signal(rewards: Rewards) -> bool:
    """Return True if at least two rewards are different.

    >>> has_signal([1.0, None, 0.0]), has_signal([1.0, None, 1.0])
    (True, False)
    """
    return len({reward for reward in rewards if reward is not None}) > 1


def _deviations(rewards: list[float]) -> list[float]:
    """Return the rewards minus their mean. If all rewards are equal, the results are exactly 0, so
    that rounding errors do not look like a correlation.

    >>> _deviations([0.1, 0.1, 0.1]), _deviations([0.0, 1.0])
    ([0.0, 0.0, 0.0], [-0.5, 0.5])
    """
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _means_json(means: HookMeans) -> dict[str, Any]:
    return {
        "mean": means.mean,
        "best_of_n": means.best,
        "num_with_signal": means.num_with_signal,
        "num_tied": means.num_tied,
    }
