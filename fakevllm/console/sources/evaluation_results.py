"""Results of evaluations, computed from the evaluated rows in the ledger. This module does no
I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fakevllm.evaluation.results import (
    Comparison,
    RowScores,
    Scores,
    Summary,
    compare,
    covering_range,
    summarize,
)
from fakevllm.ledger.evaluation_reads import EvaluatedGroup
from fakevllm.statistics.confidence_sequence import TUNED_FOR, RewardRange
from fakevllm_adapters.protocol.releases import GATE

RowKey = tuple[str, int]
"""Id of a held-out row, and how often the same version had sampled this row before. The release
gate draws a row several times."""


@dataclass(frozen=True, slots=True)
class VersionResult:
    """The result of one version of the weights in an evaluation."""

    label: str
    """The version. It is a range if new weights were published during the evaluation, and `?` if
    the version is unknown."""
    newest: int | None
    """The version, or the last one of a range; None if the version is unknown."""
    summary: Summary
    comparison: Comparison | None
    """Comparison with the oldest version; None for the oldest version itself."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """One held-out row, with the samples of each version."""

    row_id: str
    question: str
    groups: Sequence[EvaluatedGroup | None]
    """One entry for each version; None if the version has not sampled the row."""


@dataclass(frozen=True)
class EvaluationResult:
    """The results of one evaluation."""

    eval_id: str
    groups: Sequence[EvaluatedGroup]
    """The evaluated rows, oldest first. There is at least one."""
    declared_range: RewardRange

    @property
    def is_by_gate(self) -> bool:
        """True if the release gate made the evaluation. False if `fakevllm eval` made it."""
        return self.eval_id.startswith(f"{GATE}-")

    @property
    def began_at(self) -> float:
        return self.groups[0].received_at

    @property
    def hook_hashes(self) -> list[str]:
        return sorted({group.hook_hash for group in self.groups if group.hook_hash})

    @property
    def run_ids(self) -> set[str | None]:
        """Ids of the training runs whose weights were sampled. None is among them if rows do not
        name their run."""
        return {group.run_id for group in self.groups}

    @property
    def num_unscored(self) -> int:
        """Number of times that a row was sampled and got no reward at temperature 1."""
        return sum(not group.rewards for group in self.groups)

    @property
    def reason(self) -> str:
        """Reason why the first row without rewards has none. Empty if all rows have rewards."""
        return next((group.reason or "" for group in self.groups if not group.rewards), "")

    @cached_property
    def rewards(self) -> RewardRange:
        """The range of rewards that the confidence intervals assume. It is the declared range,
        extended to all rewards that occur."""
        return covering_range(self.declared_range, self._scores)

    @cached_property
    def versions(self) -> list[VersionResult]:
        """The results of each version, oldest version first."""
        first, *others = self._scores
        rewards = self.rewards
        # The gate ends an evaluation as soon as it can decide, so the number of rows is not fixed.
        tuned_for = TUNED_FOR if self.is_by_gate else None
        differences = (compare(first, one, rewards, tuned_for=tuned_for) for one in others)
        comparisons = [None, *differences]
        return [
            VersionResult(
                _label(part),
                max(_versions(part), default=None),
                summarize(scores, rewards, tuned_for=tuned_for),
                comparison,
            )
            for part, scores, comparison in zip(self._parts, self._scores, comparisons, strict=True)
        ]

    @cached_property
    def rows(self) -> list[RowResult]:
        """All rows, in the order in which they were first sampled."""
        keyed = [dict(_with_keys(part)) for part in self._parts]
        keys = {key: None for part in keyed for key in part}
        return [_row(key, [part.get(key) for part in keyed]) for key in keys]

    @cached_property
    def _parts(self) -> list[list[EvaluatedGroup]]:
        """The evaluated rows of each version. If no row was sampled by several versions, the
        evaluation has measured the served weights. All rows then form one list, even if new weights
        were published meanwhile."""
        versions_of = defaultdict[str, set[int | None]](set)
        by_version = defaultdict[int | None, list[EvaluatedGroup]](list)
        for group in self.groups:
            versions_of[group.row_id].add(group.version)
            by_version[group.version].append(group)
        if all(len(versions) == 1 for versions in versions_of.values()):
            return [list(self.groups)]
        order = sorted(by_version, key=lambda version: (version is None, version or 0))
        return [by_version[version] for version in order]

    @cached_property
    def _scores(self) -> list[Scores]:
        return [
            {
                f"{row_id} {number}": RowScores(group.rewards, group.greedy)
                for (row_id, number), group in _with_keys(part)
                if group.rewards
            }
            for part in self._parts
        ]


def results_of(
    groups: Iterable[EvaluatedGroup], declared_range: RewardRange
) -> list[EvaluationResult]:
    """Return the results of all evaluations to which these rows belong, newest evaluation first.
    `groups` are evaluated rows, oldest first."""
    by_id = defaultdict[str, list[EvaluatedGroup]](list)
    for group in groups:
        by_id[group.eval_id].append(group)
    results = [EvaluationResult(eval_id, part, declared_range) for eval_id, part in by_id.items()]
    return sorted(results, key=lambda result: result.began_at, reverse=True)


def _with_keys(groups: Sequence[EvaluatedGroup]) -> Iterable[tuple[RowKey, EvaluatedGroup]]:
    numbers = defaultdict[str, int](int)
    for group in groups:
        row_id = group.row_id or group.group_id
        yield (row_id, numbers[row_id]), group
        numbers[row_id] += 1


def _row(key: RowKey, groups: Sequence[EvaluatedGroup | None]) -> RowResult:
    question = next(group.question for group in groups if group is not None)
    return RowResult(key[0], question, groups)


def _label(groups: Sequence[EvaluatedGroup]) -> str:
    known = _versions(groups)
    if not known:
        return "?"
    first, last = min(known), max(known)
    return str(first) if first == last else f"{first} to {last}"


def _versions(groups: Sequence[EvaluatedGroup]) -> list[int]:
    return [group.version for group in groups if group.version is not None]
