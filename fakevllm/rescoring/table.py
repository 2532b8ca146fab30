"""A table for the terminal that compares the rewards of new hooks with the old, logged rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fakevllm.ledger.broken_rows import BrokenGroup
from fakevllm.rescoring.change_lines import change_lines, share
from fakevllm.rescoring.comparison import HookComparison, HookMeans
from fakevllm.runtime.plurals import counted
from fakevllm.runtime.terminal_text import printable

_NO_ROWS = "hooks get no metadata of it, so set dataset.file to the file of that time"
MAX_LISTED = 5
"""Maximum number of unreadable groups that are listed."""


@dataclass(slots=True)
class Rescored:
    """The results of one run of `fakevllm rescore`."""

    ledger: Path
    """Ledger file that has the new rewards."""
    hook_hash: str = ""
    comparison: HookComparison = field(default_factory=HookComparison)
    broken: list[BrokenGroup] = field(default_factory=list[BrokenGroup])


def render(rescored: Rescored, title: str) -> Group:
    """Return the results for the terminal: a table of the means of the old and the new rewards,
    lines that describe the changes, and warnings."""
    comparison = rescored.comparison
    num_groups = counted(comparison.num_groups, "group")
    texts = [_warnings(rescored)]
    if comparison.num_compared:
        texts.insert(0, Text("\n".join(change_lines(comparison))))
    table = _means(comparison, f"{title}: {num_groups}")
    return Group(table, *(text for text in texts if text))


def _means(comparison: HookComparison, title: str) -> Table:
    table = Table(title=Text(title))
    table.add_column("rewards", no_wrap=True)
    for name in ("mean of all", "mean of the best of N", "groups with a signal"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("old", *_cells(comparison.old, comparison.num_compared))
    table.add_row("new", *_cells(comparison.new, comparison.num_compared))
    return table


def _cells(means: HookMeans, num_groups: int) -> list[str]:
    # Adding 0 turns a rounded -0.0 into 0.0.
    numbers = [
        "-" if value is None else f"{round(value, 3) + 0.0:.3f}"
        for value in (means.mean, means.best)
    ]
    return [*numbers, share(means.num_with_signal, num_groups)]


def _warnings(rescored: Rescored) -> Text:
    comparison, broken = rescored.comparison, rescored.broken
    lines: list[tuple[str, str]] = []
    if num := comparison.num_known:
        groups = counted(num, "group", "were", "was")
        lines.append((f"{groups} scored by an earlier command (--again scores them again)", "dim"))
    if num := comparison.num_without_old:
        groups = counted(num, "group", "have", "has")
        lines.append((f"{groups} no old reward, and not compared", "dim"))
    if num := comparison.num_without_task:
        groups = counted(num, "group", "belong", "belongs")
        lines.append((f"{groups} to a dataset row that is unknown here: {_NO_ROWS}", "red"))
    for reason, num in comparison.failures.most_common():
        lines.append((f"the new hooks failed for {counted(num, 'group')}: {reason}", "red"))
    if comparison.first_failure is not None:
        lines.append((f"  first: {printable(comparison.first_failure)}", "red"))
    if broken:
        lines.append((f"{counted(len(broken), 'group')} cannot be read, and not scored:", "red"))
        lines += [
            (f"  {one.group_id}: {printable(one.error)}", "red") for one in broken[:MAX_LISTED]
        ]
    return Text("\n").join(Text(line, style) for line, style in lines)
