"""Show the progress of a run. On a terminal, show a progress bar. Elsewhere, print one line per
phase and per step."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class ProgressDisplay:
    """Display of a run's progress, as a progress bar or as lines of text. Any thread may call the
    methods."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("step {task.fields[step]} of {task.total}"),
            TextColumn("reward {task.fields[reward]}"),
            TextColumn("{task.fields[rate]} tokens/s"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task(
            "starting", total=num_steps, step=0, reward="–", rate="–"
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show_phase(self, phase: str) -> None:
        self._progress.update(self._bar, description=phase)
        if not self._console.is_terminal:
            self.print_line(phase)

    def show_earlier_steps(self, steps_before: int) -> None:
        """Show that earlier runs have already trained `steps_before` steps."""
        self._progress.update(self._bar, completed=steps_before, step=steps_before)

    def show_fraction(self, steps_done: float) -> None:
        """Set the progress bar to a number of steps. The number need not be whole, because each
        ended episode counts as a fraction of its training step."""
        self._progress.update(self._bar, completed=min(steps_done, self._num_steps))

    def show_step(self, steps_done: int, mean_reward: float, tokens_per_s: float) -> None:
        reward, rate = f"{mean_reward:.2f}", f"{tokens_per_s:,.0f}"
        self._progress.update(
            self._bar, completed=steps_done, step=steps_done, reward=reward, rate=rate
        )
        if not self._console.is_terminal:
            self.print_line(
                f"step {steps_done} of {self._num_steps}: mean reward {reward}, {rate} tokens/s"
            )

    def print_line(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
