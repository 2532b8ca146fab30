"""Run `fakevllm demo` with each pair of engines and several seeds, and compare what is learned.

    python -m benchmarks.demo_engines [--seeds 3] [--steps 150] [--pairs embedded,vllm,verl]
                                      [--keep FOLDER] [--write]

All pairs train the same model on the same questions. Therefore the right answers after training
should differ little between them. The exit code is 1 if the mean over the seeds differs by more
than MAX_DIFFERENCE. The environment needs vLLM, verl and Ray. A run in FOLDER that has ended is not
repeated.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks import demo_learning, learning_runs
from benchmarks.demo_learning import DemoRun
from benchmarks.results import conditions, markdown_table, print_table, replace_section

TITLE = "demo_engines"
NUM_SEEDS = 3
NUM_STEPS = 150
MAX_DIFFERENCE = 0.05
"""Largest accepted difference between two pairs of the share of right answers after training."""
WINDOW = 15
"""Number of steps of each row in the table of the curves."""
NUM_VERL_WORKERS = 2
PAIRS: dict[str, tuple[str, list[str]]] = {
    "embedded": ("embedded samples and trains", []),
    "vllm": ("vLLM samples, embedded trains", ["--backend", "vllm"]),
    "verl": (
        f"vLLM samples, verl trains with {NUM_VERL_WORKERS} workers",
        ["--backend", "verl", f"--trainer-arg=--num-workers={NUM_VERL_WORKERS}"],
    ),
}
"""Name of each pair in the tables, and the arguments of `fakevllm demo` that choose it."""

Header = list[str]
Rows = list[list[str]]


def main() -> None:
    parser = learning_runs.create_parser(__doc__, NUM_SEEDS)
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="training steps of each run")
    parser.add_argument("--pairs", default=",".join(PAIRS), help="pairs, separated by commas")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    args = parser.parse_args()
    pairs = args.pairs.split(",")
    if unknown := set(pairs) - set(PAIRS):
        parser.error(f"--pairs takes {', '.join(PAIRS)}, got {', '.join(sorted(unknown))}")
    run_conditions = conditions()
    with tempfile.TemporaryDirectory() as temporary:
        runs = {
            pair: list(_runs(args.keep or Path(temporary), pair, args.seeds, args.steps))
            for pair in pairs
        }
    verdict, is_close = compare(runs)
    for table in (create_table(runs), create_curves(runs)):
        print_table(*table)
    print(verdict)
    if args.write:
        legend = (
            f"{verdict}\n\nA probe is the share of right answers to 200 fixed questions at "
            f"temperature 1. The curves below are means over {WINDOW} steps and all seeds, of the "
            "mean reward of all siblings."
        )
        text = markdown_table(*create_table(runs)) + f"\n{legend}\n\n"
        text += markdown_table(*create_curves(runs))
        replace_section(TITLE, f"{run_conditions}\n{text}")
    sys.exit(0 if is_close else 1)


def _runs(folder: Path, pair: str, num_seeds: int, num_steps: int) -> Iterator[DemoRun]:
    for seed in range(num_seeds):
        run_folder = folder / f"{pair}-{seed}-{num_steps}"
        numbers = run_folder / "numbers.json"
        if numbers.exists():
            yield DemoRun.from_json(json.loads(numbers.read_text()))
            continue
        shutil.rmtree(run_folder, ignore_errors=True)  # of a run that was interrupted
        print(f"{pair}, seed {seed}: training", flush=True)
        arguments = [*PAIRS[pair][1], "--steps", str(num_steps)]
        yield demo_learning.run(run_folder, seed, "none", arguments)


def compare(runs: dict[str, list[DemoRun]]) -> tuple[str, bool]:
    """Return a sentence about the largest difference between two pairs, and whether it is at most
    MAX_DIFFERENCE."""
    means = {pair: fmean(run.after for run in of_pair) for pair, of_pair in runs.items()}
    difference = max(means.values()) - min(means.values())
    of_pairs = ", ".join(f"{PAIRS[pair][0]}: {mean:.3f}" for pair, mean in means.items())
    sentence = (
        f"Right answers after training, mean over the seeds: {of_pairs}. The largest difference is "
        f"{difference:.3f}; at most {MAX_DIFFERENCE} is accepted."
    )
    return sentence, difference <= MAX_DIFFERENCE


def create_table(runs: dict[str, list[DemoRun]]) -> tuple[Header, Rows]:
    """Return the header, and one row for each run."""
    header = ["engines", "seed", "probe before", "after", "policy mean at the start", "at the end"]
    return [*header, "steps", "wall s"], [
        [
            PAIRS[pair][0],
            str(run.seed),
            f"{run.before:.3f}",
            f"{run.after:.3f}",
            f"{run.start:.3f}",
            f"{run.end:.3f}",
            str(len(run.policy_mean)),
            f"{run.wall_s:.0f}",
        ]
        for pair, of_pair in runs.items()
        for run in of_pair
    ]


def create_curves(runs: dict[str, list[DemoRun]]) -> tuple[Header, Rows]:
    """Return the header, and one row for each WINDOW of steps, with a column for each pair."""
    num_steps = min(len(run.policy_mean) for of_pair in runs.values() for run in of_pair)
    rows = [
        [f"{first + 1} to {last}", *(_mean(of_pair, first, last) for of_pair in runs.values())]
        for first in range(0, num_steps, WINDOW)
        for last in [min(first + WINDOW, num_steps)]
    ]
    return ["steps", *(PAIRS[pair][0] for pair in runs)], rows


def _mean(runs: Sequence[DemoRun], first: int, last: int) -> str:
    return f"{fmean(fmean(run.policy_mean[first:last]) for run in runs):.3f}"


if __name__ == "__main__":
    main()
