"""Benchmarks of learning: for every seed, make one run with training and one control run with
frozen weights. Put both runs into a table."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import ClassVar, TypeVar

from benchmarks.results import markdown_table, print_table, replace_section

CONTROLS = ("none", "frozen")


@dataclass(frozen=True, slots=True)
class LearningRun(ABC):
    """One training run, or one control run with frozen weights."""

    WINDOW: ClassVar[int]
    """Number of steps at the start and at the end over which the policy's mean is taken."""

    seed: int
    control: str
    """Value of the job's key `control`: "none" for a training run."""
    policy_mean: list[float]
    """Mean reward of all siblings of the groups of each step."""
    wall_s: float

    @property
    def start(self) -> float:
        """Mean reward over the first WINDOW steps."""
        return fmean(self.policy_mean[: self.WINDOW])

    @property
    def end(self) -> float:
        """Mean reward over the last WINDOW steps."""
        return fmean(self.policy_mean[-self.WINDOW :])

    @abstractmethod
    def own_cells(self) -> dict[str, str]:
        """Return the cells that only this benchmark has, by column."""


AnyRun = TypeVar("AnyRun", bound=LearningRun)


def create_parser(doc: str | None, num_seeds: int = 2) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks of learning have. `num_seeds` is the
    default number of seeds."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=num_seeds, help="number of seeds")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    return parser


def run_with_controls(
    run: Callable[[Path, int, str], AnyRun], folder: Path, num_seeds: int, num_parallel: int = 1
) -> list[AnyRun]:
    """Return the runs of all seeds, each followed by its control.

    `run` is called for each run with a new folder, the seed, and the value of the job's key
    `control`. `num_parallel` runs happen at the same time.
    """
    chosen = [(seed, control) for seed in range(num_seeds) for control in CONTROLS]
    with ThreadPoolExecutor(num_parallel) as pool:
        running = [
            pool.submit(run, folder / f"{control}-{seed}", seed, control)
            for seed, control in chosen
        ]
        return [future.result() for future in running]


def print_runs(runs: Sequence[LearningRun]) -> None:
    """Print the table of the runs to the terminal."""
    header, rows = create_table(runs)
    print_table(header, rows, f"mean over the first and last {runs[0].WINDOW} steps")


def write_section(title: str, conditions: str, runs: Sequence[LearningRun], legend: str) -> None:
    """Write the table with its conditions and its legend as a section of RESULTS.md."""
    replace_section(title, f"{conditions}\n{markdown_table(*create_table(runs))}\n{legend}")


def create_table(runs: Sequence[LearningRun]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows."""
    cells = [_cells(run) for run in runs]
    return list(cells[0]), [list(row.values()) for row in cells]


def _cells(run: LearningRun) -> dict[str, str]:
    return {
        "seed": str(run.seed),
        "updates": "yes" if run.control == "none" else f"no ({run.control})",
        "policy mean at the start": f"{run.start:.3f}",
        "at the end": f"{run.end:.3f}",
        "change": f"{run.end - run.start:+.3f}",
        **run.own_cells(),
        "wall s": f"{run.wall_s:.0f}",
    }
