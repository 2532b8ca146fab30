"""The comparison of new hooks with the old rewards, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fakevllm.ledger.broken_rows import BrokenGroup
from fakevllm.rescoring.comparison import HookComparison, HookMeans
from fakevllm.runtime.plurals import counted
from fakevllm.runtime.terminal_text import printable

MAX_LISTED = 5
"""Maximum number of unreadable groups that are listed."""


def render(comparison: HookComparison, broken: Sequence[BrokenGroup], title: str) -> Group:
    """Return the means of the old and the new rewards as a table, and what changed as a list of
    lines."""
    return Group(_means(comparison, title), _remarks(comparison, broken))


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
    return [*numbers, _share(means.num_with_signal, num_groups)]


def _remarks(comparison: HookComparison, broken: Sequence[BrokenGroup]) -> Text:
    num = comparison.num_compared
    lines = [
        f"correlation of old and new rewards: {_number(comparison.correlation)}, within groups "
        f"{_number(comparison.correlation_within)} ({counted(comparison.num_siblings, 'sibling')})",
        f"two siblings change their order in {_share(comparison.num_reordered, num)} groups",
        f"a signal is gained in {_share(comparison.num_gained, num)} groups, and lost in "
        f"{_share(comparison.num_lost, num)}",
        "another sibling would have been served in "
        f"{_share(comparison.num_served_otherwise, comparison.num_served)} groups",
    ]
    text = Text("\n".join(lines))
    if comparison.num_without_old:
        have = counted(comparison.num_without_old, "group", "have", "has")
        text.append(f"\n{have} no old reward, and not compared", "dim")
    for reason, num_failed in comparison.failures.most_common():
        text.append(f"\nthe new hooks failed for {counted(num_failed, 'group')}: {reason}", "red")
    if broken:
        text.append(f"\n{counted(len(broken), 'group')} cannot be read, and not scored:", "red")
        for one in broken[:MAX_LISTED]:
            text.append(f"\n  {one.group_id}: {printable(one.error)}", "red")
    return text


def _share(num: int, total: int) -> str:
    """Return a number with its share.

    >>> _share(3, 12), _share(0, 0)
    ('3 of 12 (25 %)', '0 of 0')
    """
    return f"{num} of {total} ({num / total:.0%})".replace("%", " %") if total else f"{num} of 0"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
