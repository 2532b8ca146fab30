"""What is seen of a run: a bar in a terminal, a line a step where there is none."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Screen:
    """Any thread may tell it."""

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

    def phase(self, told: str) -> None:
        self._progress.update(self._bar, description=told)
        if not self._console.is_terminal:
            self.line(told)

    def begin(self, steps_before: int) -> None:
        """A run that goes on does not begin at nothing."""
        self._progress.update(self._bar, completed=steps_before, step=steps_before)

    def part(self, steps_done: float) -> None:
        """Episodes count as parts of their step."""
        self._progress.update(self._bar, completed=min(steps_done, self._num_steps))

    def step(self, steps_done: int, reward: float, tokens_per_s: float) -> None:
        told, rate = f"{reward:.2f}", f"{tokens_per_s:,.0f}"
        self._progress.update(
            self._bar, completed=steps_done, step=steps_done, reward=told, rate=rate
        )
        if not self._console.is_terminal:
            self.line(
                f"step {steps_done} of {self._num_steps}: mean reward {told}, {rate} tokens/s"
            )

    def line(self, told: str) -> None:
        self._console.print(told, highlight=False, markup=False, soft_wrap=True)
