"""Render the demo's live display from a snapshot of the run. This module does no I/O."""

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
"""Width of the display in characters. It fits into a terminal of 80 columns."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a demo run at one moment, as the live display shows it."""

    phase: str
    """Description of what the demo is doing."""
    step: int
    num_steps: int
    policy_mean: Sequence[float] = ()
    returned_best: Sequence[float] = ()
    without_signal: int = 0
    """Number of groups whose rewards were all equal, so that nothing could be learned from them."""
    num_groups: int = 0
    tokens_per_s: float = 0.0
    counts: Sequence[tuple[str, int]] = ()
    """Number of groups by state in the ledger."""
    notes: Sequence[str] = ()
    releases: str | None = None
    """State of the releases in one line; None without the mode `gated`."""

    @property
    def num_done(self) -> int:
        """Number of training steps that the demo run has finished."""
        return min(max(self.step - 1, 0), self.num_steps)


def render(snapshot: Snapshot) -> Panel:
    numbers = Table.grid(padding=(0, 2))
    for label, values, colour in (
        ("policy mean", snapshot.policy_mean, "green"),
        ("returned best", snapshot.returned_best, "cyan"),
    ):
        numbers.add_row(label, _latest(values), Text(sparkline(values), colour))
    facts = Table.grid(padding=(0, 2))
    facts.add_row("without signal", f"{snapshot.without_signal} of {snapshot.num_groups} groups")
    facts.add_row("sampled", f"{snapshot.tokens_per_s:,.0f} tokens/s")
    facts.add_row(
        "ledger", ", ".join(f"{num} {state}" for state, num in snapshot.counts) or "empty"
    )
    if snapshot.releases is not None:
        facts.add_row("releases", snapshot.releases)
    notes = [Text(note, "yellow") for note in snapshot.notes[-3:]]
    parts = (Text(snapshot.phase, "bold"), _steps(snapshot), numbers, facts, *notes)
    return Panel(Group(*parts), title="fakevllm demo", width=WIDTH)


def _steps(snapshot: Snapshot) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_row(
        f"step {snapshot.num_done} of {snapshot.num_steps}",
        ProgressBar(total=snapshot.num_steps, completed=snapshot.num_done, width=40),
    )
    return row


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return a text that draws values between 0 and 1 as bars, one character per value. If there
    are more than `width` values, each character shows the mean of neighbouring values.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    if len(values) > width:
        windows = [
            values[len(values) * i // width : len(values) * (i + 1) // width] for i in range(width)
        ]
        values = [sum(part) / len(part) for part in windows]
    return "".join(
        BARS[min(max(round(value * (len(BARS) - 1)), 0), len(BARS) - 1)] for value in values
    )


def _latest(values: Sequence[float], last: int = 5) -> str:
    recent = values[-last:]
    return f"{sum(recent) / len(recent):.2f}" if recent else "–"
