"""Run `fakevllm demo` with and without training steps beside episodes, and compare the speed and
the learning.

    python -m benchmarks.async_steps [--seeds 3] [--steps 150] [--ahead 0,2] [--backend embedded]
                                     [--keep FOLDER] [--write]

The demo's requests go through the proxy, which answers apps during every step. Therefore
`async_steps` changes only how many groups wait for the trainer. The embedded engine samples and
trains on one thread, so its trainer slows down while it samples. A run in FOLDER that has ended is
not repeated.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import demo_learning, learning_runs
from benchmarks.demo_learning import DemoRun
from benchmarks.results import conditions, markdown_table, print_table, replace_section
from benchmarks.run_log_reader import read_step_entries

TITLE = "async_steps"
NUM_SEEDS = 3
NUM_STEPS = 150
GROUPS_PER_STEP = 8
"""The demo's `batch_size`."""
WINDOW = 15
"""Number of steps of each row in the table of the curves."""

Header = list[str]
Rows = list[list[str]]


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a run, and the age of the calls that it trained."""

    groups_per_s: float
    tokens_per_s: float
    """Trained tokens per second."""
    wait_share: float
    """Share of the time in which the trainer waited for groups."""
    staleness_mean: float
    staleness_max: float

    @classmethod
    def of_steps(cls, steps: Sequence[dict[str, Any]]) -> Speed:
        """Return the speed of a run with these metrics of its steps. The first step is left out,
        because it has no duration."""
        timed = [metrics for metrics in steps if "step_seconds" in metrics]
        seconds = sum(metrics["step_seconds"] for metrics in timed)
        waited = sum(each["trainer_wait_share"] * each["step_seconds"] for each in timed)
        return cls(
            groups_per_s=len(timed) * GROUPS_PER_STEP / seconds,
            tokens_per_s=sum(metrics["tokens_trained"] for metrics in timed) / seconds,
            wait_share=waited / seconds,
            staleness_mean=fmean(metrics["staleness_mean"] for metrics in timed),
            staleness_max=max(metrics["staleness_max"] for metrics in timed),
        )


Runs = dict[int, list[tuple[DemoRun, Speed]]]
"""The runs of all seeds, by the job's `async_steps`."""


def main() -> None:
    parser = learning_runs.create_parser(__doc__, NUM_SEEDS)
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="training steps of each run")
    parser.add_argument("--ahead", default="0,2", help="values of async_steps, with commas")
    parser.add_argument("--backend", default="embedded", help="engines of the demo")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    args = parser.parse_args()
    run_conditions = conditions()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        runs: Runs = {
            num_ahead: list(_runs(folder, num_ahead, args.seeds, args.steps, args.backend))
            for num_ahead in map(int, args.ahead.split(","))
        }
    for table in (create_table(runs), create_curves(runs)):
        print_table(*table)
    if args.write:
        legend = (
            "A probe is the share of right answers to 200 fixed questions at temperature 1. Groups "
            "and trained tokens per second count from the end of the first step. The trainer waits "
            "while too few groups are complete. The age of a call counts weight versions. The "
            f"curves below are means over {WINDOW} steps and all seeds, of the mean reward of all "
            "siblings."
        )
        text = markdown_table(*create_table(runs)) + f"\n{legend}\n\n"
        text += markdown_table(*create_curves(runs))
        replace_section(TITLE, f"{run_conditions}\n{text}")


def _runs(
    folder: Path, num_ahead: int, num_seeds: int, num_steps: int, backend: str
) -> Iterator[tuple[DemoRun, Speed]]:
    for seed in range(num_seeds):
        run_folder = folder / f"{backend}-{num_ahead}-{seed}-{num_steps}"
        numbers = run_folder / "numbers.json"
        if numbers.exists():
            run = DemoRun.from_json(json.loads(numbers.read_text()))
        else:
            shutil.rmtree(run_folder, ignore_errors=True)  # of a run that was interrupted
            print(f"async_steps {num_ahead}, seed {seed}: training", flush=True)
            arguments = ["--backend", backend, "--steps", str(num_steps)]
            arguments += ["--async-steps", str(num_ahead)]
            run = demo_learning.run(run_folder, seed, "none", arguments)
        entries = read_step_entries(run_folder / "run")
        yield run, Speed.of_steps([entry["metrics"] for entry in entries])


def create_table(runs: Runs) -> tuple[Header, Rows]:
    """Return the header, and one row for each run."""
    header = ["async_steps", "seed", "groups per s", "trained tokens per s", "trainer waits"]
    header += ["age of a call, mean", "longest", "probe before", "after", "wall s"]
    return header, [
        [
            str(num_ahead),
            str(run.seed),
            f"{speed.groups_per_s:.2f}",
            f"{speed.tokens_per_s:.0f}",
            f"{speed.wait_share:.0%}",
            f"{speed.staleness_mean:.2f}",
            f"{speed.staleness_max:.0f}",
            f"{run.before:.3f}",
            f"{run.after:.3f}",
            f"{run.wall_s:.0f}",
        ]
        for num_ahead, of_seeds in runs.items()
        for run, speed in of_seeds
    ]


def create_curves(runs: Runs) -> tuple[Header, Rows]:
    """Return the header, and one row for each WINDOW of steps, with a column for each value of
    `async_steps`."""
    num_steps = min(len(run.policy_mean) for of_seeds in runs.values() for run, _ in of_seeds)
    rows = [
        [f"{first + 1} to {last}", *(_mean(of_seeds, first, last) for of_seeds in runs.values())]
        for first in range(0, num_steps, WINDOW)
        for last in [min(first + WINDOW, num_steps)]
    ]
    return ["steps", *(f"async_steps {num_ahead}" for num_ahead in runs)], rows


def _mean(of_seeds: Sequence[tuple[DemoRun, Speed]], first: int, last: int) -> str:
    return f"{fmean(fmean(run.policy_mean[first:last]) for run, _ in of_seeds):.3f}"


if __name__ == "__main__":
    main()
