"""The report of an evaluation as a table for the terminal."""

from __future__ import annotations

from collections import Counter

from rich.table import Table
from rich.text import Text

from fakevllm.evaluation.report import EvalReport


def render(report: EvalReport) -> Table:
    """Return the report as a table with one line per version. The caption has the rows that nobody
    solves and those that have no reward."""
    num_rows = len(report.rows)
    title = Text(f"{report.dataset}: {num_rows} rows, {report.num_samples} samples each")
    table = Table(title=title, caption=_caption(report), caption_justify="left")
    table.add_column("version", no_wrap=True)
    for name in ("rows", "mean reward", "95 % interval", "greedy"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, summary in zip(report.labels, report.summaries, strict=True):
        mean = summary.mean
        table.add_row(
            label,
            str(summary.num_rows),
            "-" if mean is None else f"{mean.mean:.3f}",
            "-" if mean is None else f"{mean.low:.3f} to {mean.high:.3f}",
            "-" if summary.greedy is None else f"{summary.greedy:.3f}",
        )
    return table


def _caption(report: EvalReport) -> Text:
    lines = [
        f"{len(report.unsolved)} rows have no sample with a reward of {report.solved_at:g} or more"
    ]
    if unscored := report.unscored:
        reasons = Counter(row.reply.reason or "no sample has a reward" for row in unscored)
        reason, _ = reasons.most_common(1)[0]
        lines.append(f"{len(unscored)} rows have no reward and do not count ({reason})")
    if (rewards := report.rewards) != report.declared_range:
        lines.append(
            f"rewards from {rewards.low:g} to {rewards.high:g} were seen, and the interval assumes "
            "this range: pass --reward-range with the range that your hook can return"
        )
    return Text("\n".join(lines))
