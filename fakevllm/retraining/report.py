"""The figures of a `fakevllm retrain`, and their table for the terminal. This module does no
I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fakevllm.ledger.broken_rows import BrokenGroup
from fakevllm.runtime.plurals import counted

MAX_LISTED = 5
"""Number of unreadable groups that the terminal lists."""


@dataclass(slots=True)
class EffectiveSampleSize:
    """The effective sample size over the steps of a run, as a share of the run's logged tokens.
    Logged tokens are tokens that an earlier run sampled.

    The share is (Σ w)² / (n Σ w²), where n is the number of tokens and w are their truncated
    importance weights (L. Kish, "Survey Sampling", 1965). The importance weights of a step's tokens
    are computed with the model before the step.

    >>> total = EffectiveSampleSize()
    >>> total.add({"logged_tokens": 4.0, "logged_weight": 1.0, "logged_ess": 0.5})
    >>> total.share
    0.5
    """

    num: float = 0.0
    weights: float = 0.0
    squares: float = 0.0
    lowest: float | None = None
    """The smallest effective sample size of a step."""

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of one training step to the sums over all steps. A step without logged
        tokens (tokens that an earlier run sampled) is ignored."""
        num, ess = metrics.get("logged_tokens", 0.0), metrics.get("logged_ess", 0.0)
        if not num:
            return
        weights = num * metrics["logged_weight"]
        self.num += num
        self.weights += weights
        self.squares += weights**2 / (num * ess) if ess else 0.0
        self.lowest = ess if self.lowest is None else min(self.lowest, ess)

    @property
    def share(self) -> float | None:
        """The effective sample size divided by the number of logged tokens (tokens that an earlier
        run sampled). None if there are no such tokens."""
        if not self.num:
            return None
        return self.weights**2 / (self.num * self.squares) if self.squares else 0.0


@dataclass(slots=True)
class Staleness:
    """How far the versions that sampled the groups are from the version with which training starts.

    Versions of different runs cannot be compared. Groups that another run sampled are therefore
    only counted.
    """

    start: int
    """Version of the weights with which training starts."""
    run_id: str = ""
    """Run to which this version belongs."""
    num: int = 0
    total: float = 0.0
    first: int | None = None
    last: int | None = None
    largest: int = 0
    num_of_other_runs: int = 0

    def add(self, run_id: str | None, versions: Sequence[int]) -> None:
        """Count one group (a request with its answers). `versions` are the versions of the weights
        that sampled the group's tokens."""
        if run_id != self.run_id or not versions:
            self.num_of_other_runs += 1
            return
        distances = [abs(version - self.start) for version in versions]
        self.num += 1
        self.total += sum(distances) / len(distances)
        self.largest = max(self.largest, *distances)
        self.first = min(versions) if self.first is None else min(self.first, *versions)
        self.last = max(versions) if self.last is None else max(self.last, *versions)

    @property
    def mean(self) -> float | None:
        """Mean distance of the groups from the version `start`. The distance of a group is the mean
        difference between `start` and the versions that sampled the group. None if no group of the
        run `run_id` was added."""
        return self.total / self.num if self.num else None


@dataclass(slots=True)
class RetrainReport:
    """The figures of one `fakevllm retrain`, which are collected while it trains."""

    staleness: Staleness
    num_selected: int = 0
    num_sent: int = 0
    """Groups that were pooled and not dropped later, counted once for each epoch."""
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Groups that were not trained, by the slug of the reason. A group that the server drops after
    it has pooled it counts once for each epoch."""
    broken: list[BrokenGroup] = field(default_factory=list[BrokenGroup])
    steps: dict[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])
    """Metrics by the number of the step. A step that is trained again after a crash counts once."""
    num_left: int = 0
    """Groups that were left over at the end, because they were too few for a step."""

    def add_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a training step to the report. The new metrics replace those of an
        earlier step with the same number."""
        self.steps[step] = metrics

    def restore(self, step: int) -> None:
        """Remove the metrics of all steps after `step` from the report. The server lost these steps
        in a crash."""
        self.steps = {number: one for number, one in self.steps.items() if number <= step}

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    @property
    def last_step(self) -> int:
        """Number of the last training step in the report; 0 if the report has no steps."""
        return max(self.steps, default=0)

    @property
    def num_without_update(self) -> int:
        return sum(bool(metrics.get("no_update")) for metrics in self.steps.values())

    @property
    def ess(self) -> EffectiveSampleSize:
        """The effective sample size of the logged tokens (tokens that an earlier run sampled), over
        all training steps in the report."""
        total = EffectiveSampleSize()
        for metrics in self.steps.values():
            total.add(metrics)
        return total

    @property
    def reward_mean(self) -> float | None:
        """Mean reward of all training steps in the report, as scored by the new hooks. None without
        steps."""
        means = [one["reward_mean"] for one in self.steps.values() if "reward_mean" in one]
        return sum(means) / len(means) if means else None

    def as_json(self) -> dict[str, Any]:
        ess = self.ess
        return {
            "groups_selected": self.num_selected,
            "groups_in_steps": self.num_sent - self.num_left,
            "groups_left": self.num_left,
            "groups_skipped": dict(self.skipped),
            "steps": self.num_steps,
            "last_step": self.last_step,
            "steps_without_update": self.num_without_update,
            "reward_mean": self.reward_mean,
            "effective_sample_size": ess.share,
            "lowest_effective_sample_size": ess.lowest,
            "staleness_mean": self.staleness.mean,
            "staleness_max": self.staleness.largest if self.staleness.num else None,
            "groups_of_other_runs": self.staleness.num_of_other_runs,
            "unreadable": {one.group_id: one.error for one in self.broken},
        }


def render(report: RetrainReport, title: str) -> Group:
    """Return the report of a `fakevllm retrain` as text for the terminal: a table, with lines of
    text below it."""
    table = Table(title=title, show_header=False)
    for name, value in _rows(report):
        table.add_row(name, value)
    return Group(table, *(Text(line) for line in _lines(report)))


def _rows(report: RetrainReport) -> Iterable[tuple[str, str]]:
    ess, staleness = report.ess, report.staleness
    trained = report.num_sent - report.num_left
    yield "groups in steps", f"{trained} (selected: {report.num_selected})"
    yield "steps", f"{report.num_steps} ({report.num_without_update} without an update)"
    yield "mean reward under the hooks", _number(report.reward_mean, ".3f")
    yield (
        "effective sample size",
        f"{_number(ess.share, '.0%')} of the tokens (lowest step: {_number(ess.lowest, '.0%')})",
    )
    yield (
        "sampled by versions",
        f"{_number(staleness.first, 'd')} to {_number(staleness.last, 'd')}",
    )
    yield (
        f"distance from version {staleness.start}",
        f"mean {_number(staleness.mean, '.1f')}, largest {staleness.largest}",
    )


def _lines(report: RetrainReport) -> Iterable[str]:
    other = report.staleness.num_of_other_runs
    if other:
        yield f"{counted(other, 'group')} of other runs: their versions cannot be compared"
    if report.num_left:
        yield f"{counted(report.num_left, 'group')} at the end: too few for another step"
    for reason, num in report.skipped.most_common():
        yield f"not trained, {reason}: {counted(num, 'group')}"
    for one in report.broken[:MAX_LISTED]:
        yield f"group {one.group_id} cannot be read: {one.error}"
    if len(report.broken) > MAX_LISTED:
        yield f"and {len(report.broken) - MAX_LISTED} more groups that cannot be read"


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form).replace("%", " %")
