"""The report of an evaluation as tables for the terminal."""

from __future__ import annotations

from collections import Counter

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fakevllm.evaluation.report import EvalReport
from fakevllm.runtime.plurals import counted
from fakevllm.statistics.confidence_sequence import Interval


def render(report: EvalReport) -> Group:
    """Return the report as a table with one line per version. If there are several versions, a
    second table compares them with the first version. The text below the tables says how many rows
    of the dataset no sampled answer has solved, and how many rows have no reward."""
    tables = [_means(report)]
    if len(report.labels) > 1:
        tables.append(_comparisons(report))
    return Group(*tables, _remarks(report))


def _means(report: EvalReport) -> Table:
    num_rows, num_samples = counted(len(report.rows), "row"), counted(report.num_samples, "sample")
    title = Text(f"{report.dataset}: {num_rows}, {num_samples} each")
    table = Table(title=title)
    table.add_column("version", no_wrap=True)
    for name in ("rows", "mean reward", "95 % interval", "greedy"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, summary in zip(report.labels, report.summaries, strict=True):
        greedy = "-" if summary.greedy is None else f"{summary.greedy:.3f}"
        table.add_row(label, str(summary.num_rows), *_interval_cells(summary.mean), greedy)
    return table


def _comparisons(report: EvalReport) -> Table:
    table = Table(title=f"compared with version {report.labels[0]}")
    table.add_column("version", no_wrap=True)
    for name in ("difference", "95 % interval", "wins", "losses", "ties"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, comparison in zip(report.labels, report.comparisons, strict=True):
        if comparison is not None:
            table.add_row(
                label,
                *_interval_cells(comparison.difference, sign="+"),
                *(str(num) for num in (comparison.wins, comparison.losses, comparison.ties)),
            )
    return table


def _interval_cells(interval: Interval | None, sign: str = "") -> list[str]:
    if interval is None:
        return ["-", "-"]
    low, high = (f"{value:{sign}.3f}" for value in (interval.low, interval.high))
    return [f"{interval.mean:{sign}.3f}", f"{low} to {high}"]


def _remarks(report: EvalReport) -> Text:
    have = counted(len(report.unsolved), "row", "have", "has")
    lines = [f"{have} no sample with a reward of {report.solved_at:g} or more"]
    if unscored := report.unscored:
        reasons = Counter(row.reason for row in unscored)
        reason, _ = reasons.most_common(1)[0]
        have = counted(len(unscored), "row", "have no reward", "has no reward")
        effect = "and {} not count".format("does" if len(unscored) == 1 else "do")
        if len(report.labels) > 1:
            effect = f"with at least one version, {effect} there"
        lines.append(f"{have} {effect} ({reason})")
    if (rewards := report.rewards) != report.declared_range:
        lines.append(
            f"rewards from {rewards.low:g} to {rewards.high:g} were seen, and the interval assumes "
            "this range: pass --reward-range with the range that your hook can return"
        )
    return Text("\n".join(lines))
