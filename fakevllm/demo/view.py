"""What the demo shows while it runs. Pure: a snapshot in, a renderable out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 78
"""Fits the narrowest usual terminal."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The run at one moment."""

    phase: str
    step: int
    num_steps: int
    policy_mean: Sequence[float] = ()
    returned_best: Sequence[float] = ()
    without_signal: int = 0
    num_groups: int = 0
    tokens_per_s: float = 0.0
    counts: Sequence[tuple[str, int]] = ()
    notes: Sequence[str] = ()


def render(shot: Snapshot) -> Panel:
    numbers = Table.grid(padding=(0, 2))
    for label, values, colour in (
        ("policy mean", shot.policy_mean, "green"),
        ("returned best", shot.returned_best, "cyan"),
    ):
        numbers.add_row(label, _latest(values), Text(sparkline(values), colour))
    facts = Table.grid(padding=(0, 2))
    facts.add_row("without signal", f"{shot.without_signal} of {shot.num_groups} groups")
    facts.add_row("sampled", f"{shot.tokens_per_s:,.0f} tokens/s")
    facts.add_row("ledger", ", ".join(f"{num} {state}" for state, num in shot.counts) or "empty")
    notes = [Text(note, "yellow") for note in shot.notes[-3:]]
    parts = (Text(shot.phase, "bold"), _steps(shot), numbers, facts, *notes)
    return Panel(Group(*parts), title="fakevllm demo", width=WIDTH)


def _steps(shot: Snapshot) -> Table:
    done = min(max(shot.step - 1, 0), shot.num_steps)
    row = Table.grid(padding=(0, 2))
    row.add_row(
        f"step {done} of {shot.num_steps}",
        ProgressBar(total=shot.num_steps, completed=done, width=40),
    )
    return row


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last values as bars between 0 and 1, averaged where there are more than fit.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    if len(values) > width:
        cut = [
            values[len(values) * i // width : len(values) * (i + 1) // width] for i in range(width)
        ]
        values = [sum(part) / len(part) for part in cut]
    return "".join(
        BARS[min(max(round(value * (len(BARS) - 1)), 0), len(BARS) - 1)] for value in values
    )


def _latest(values: Sequence[float], last: int = 5) -> str:
    recent = values[-last:]
    return f"{sum(recent) / len(recent):.2f}" if recent else "–"
