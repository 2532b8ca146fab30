"""Benchmarks of learning: every seed trained once and once frozen, and both as rows of a table."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import ClassVar, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.results import markdown_table, replace_section

CONTROLS = ("none", "frozen")


@dataclass(frozen=True, slots=True)
class Run(ABC):
    """One training run, or its frozen control."""

    WINDOW: ClassVar[int]
    """Steps at either end over which the policy's mean is taken."""

    seed: int
    control: str
    policy_mean: list[float]
    """By step: the mean reward of all siblings of the groups it was taken from."""
    wall_s: float

    @property
    def start(self) -> float:
        return fmean(self.policy_mean[: self.WINDOW])

    @property
    def end(self) -> float:
        return fmean(self.policy_mean[-self.WINDOW :])

    @abstractmethod
    def own_cells(self) -> dict[str, str]:
        """What only this benchmark tells, by column."""


Done = TypeVar("Done", bound=Run)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="Put the table into RESULTS.md.")
    return parser


def with_controls(
    run: Callable[[Path, int, str], Done], folder: Path, num_seeds: int
) -> list[Done]:
    """`run` is called with a folder of its own, the seed and the control; a control comes right
    after the run it is to be compared with."""
    return [
        run(folder / f"{control}-{seed}", seed, control)
        for seed in range(num_seeds)
        for control in CONTROLS
    ]


def show(runs: Sequence[Run]) -> None:
    header, rows = table_of(runs)
    table = Table(*header, title=f"mean over the first and last {runs[0].WINDOW} steps")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)


def write(title: str, conditions: str, runs: Sequence[Run], legend: str) -> None:
    replace_section(title, f"{conditions}\n{markdown_table(*table_of(runs))}\n{legend}")


def table_of(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Header and rows."""
    cells = [_cells(done) for done in runs]
    return list(cells[0]), [list(row.values()) for row in cells]


def _cells(done: Run) -> dict[str, str]:
    return {
        "seed": str(done.seed),
        "updates": "yes" if done.control == "none" else f"no ({done.control})",
        "policy mean at the start": f"{done.start:.3f}",
        "at the end": f"{done.end:.3f}",
        "change": f"{done.end - done.start:+.3f}",
        **done.own_cells(),
        "wall s": f"{done.wall_s:.0f}",
    }
