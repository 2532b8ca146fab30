"""The progress bar of commands that process many rows or groups."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar() -> Progress:
    """Return a progress bar that is shown on stderr, and is removed at the end. The bar writes
    nothing to stdout, so that stdout has only the output of the command. If stderr is not a
    terminal, nothing is shown."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
