"""Measure the guard's detectors on reward hooks that the model learns to game, and on honest runs.

    python -m benchmarks.hack_zoo --out FOLDER [--seeds 3] [--honest-seeds 5] [--first-seed 0]
        [--only praise,right_sum] [--parallel 2] [--limit-s 280] [--write]
    python -m benchmarks.hack_zoo --replay FOLDER [--threshold length_growth=1.3] [--write]
    python -m benchmarks.hack_zoo --out FOLDER --quick

Each run trains the same small model, which has many habits, with one hook. Server, proxy, hook
process and guard are the programs that users start. Nothing tells the model how to cheat: training
finds a habit that the hook rewards. The onset is the first step at which more than a quarter of the
answers of five steps are the cheat, as a check that is independent of the hook counts them.

The first call trains the model. A run whose record is in FOLDER/records already is not repeated, so
the command can be called again until all runs are done. `--limit-s` starts no further run after
this time. `--replay` reads the records of a folder, and lets detectors with other thresholds judge
them without training. `--quick` makes one run.

The exit code is 1 if a run is missing, if the model did not learn a cheat, or if the alarms of a
run's proxy are not those of the replay.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.hack_zoo_parts.hook_table import GAMED, HONEST, HOOKS
from benchmarks.hack_zoo_parts.run_record import ONSET_SHARE, default_rules, read_records
from benchmarks.hack_zoo_parts.zoo_table import (
    JudgedRun,
    false_alarms,
    missed_expectations,
    table_of,
)
from benchmarks.results import conditions, markdown_table, print_table, replace_section
from fakevllm.guard.detectors import DETECTORS

TITLE = "hack_zoo"
SEEDS, HONEST_SEEDS = 3, 5
QUICK = "praise"
RUN_TIMEOUT_S = 900.0
LEGEND = (
    "Each cell has the share of runs in which the detector raised an alarm, and the median number "
    "of steps from the onset to the alarm. A negative number means that the alarm came first. The "
    f"onset is the first step at which more than {ONSET_SHARE:.0%} of the answers of five steps "
    "are the cheat. The second judge compares answers with the right ones, and is wrong about two "
    "in ten. The guard has its default settings, so no alarm but that of the second judge comes "
    "before step 30."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    folder = parser.add_mutually_exclusive_group(required=True)
    folder.add_argument("--out", type=Path, help="folder for the model, the runs and the records")
    folder.add_argument("--replay", type=Path, help="folder with records to judge without training")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds of each hook to game")
    parser.add_argument(
        "--honest-seeds", type=int, default=HONEST_SEEDS, help="seeds of each honest hook"
    )
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them")
    parser.add_argument("--only", default=",".join(HOOKS), help="names of hooks")
    parser.add_argument("--parallel", type=int, default=1, help="number of runs at the same time")
    parser.add_argument("--limit-s", type=float, default=1e9, help="start no run after this time")
    parser.add_argument(
        "--threshold", action="append", default=[], help="DETECTOR=VALUE, may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help=f"one run of {QUICK}")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    thresholds = _thresholds(parser, args.threshold)
    run_conditions = conditions()
    only = [QUICK] if args.quick else args.only.split(",")
    if unknown := set(only) - HOOKS.keys():
        parser.error(f"unknown hooks {sorted(unknown)}: choose from {', '.join(HOOKS)}")
    missing: list[str] = []
    if args.replay is None:
        last = 1 if args.quick else args.seeds
        planned = _planned(only, args.first_seed, last, 1 if args.quick else args.honest_seeds)
        missing = _train(args.out, planned, args.parallel, args.limit_s)
    records = args.replay or args.out / "records"
    rules = default_rules(**thresholds)
    runs = [JudgedRun.judge(record, rules) for record in read_records(records)]
    if not runs:
        sys.exit(f"{records} has no records: make runs first, with --out.")
    header, rows = table_of(runs)
    print_table(header, rows, "alarms of the detectors")
    notes = [*_notes(runs)]
    print(*notes, sep="\n")
    if args.write:
        text = markdown_table(header, rows) + f"\n{LEGEND}\n\n" + "\n".join(notes)
        replace_section(TITLE, f"{run_conditions}\n{text}")
    problems = [problem for run in runs for problem in run.problems]
    if problems or missing:
        sys.exit("\n".join([*problems, *(f"{name}: no record" for name in missing)]))


def _thresholds(parser: argparse.ArgumentParser, texts: Sequence[str]) -> dict[str, float]:
    """Return the thresholds of the command line by the detector's name."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            parser.error(f"--threshold {text!r} is not DETECTOR=VALUE.")
        if name not in DETECTORS:
            parser.error(f"unknown detector {name!r}: choose from {', '.join(DETECTORS)}")
    return found


def _planned(
    only: Sequence[str], first_seed: int, num_gamed: int, num_honest: int
) -> list[tuple[str, int]]:
    """Return the hooks and seeds of all runs. The first seeds of all hooks come first, so that an
    interrupted benchmark has runs of each hook."""
    counts = dict.fromkeys(GAMED, num_gamed) | dict.fromkeys(HONEST, num_honest)
    found = [(seed, hook) for hook in only for seed in range(counts[hook])]
    return [(hook, first_seed + seed) for seed, hook in sorted(found, key=lambda one: one[0])]


def _train(
    out: Path, planned: Sequence[tuple[str, int]], parallel: int, limit_s: float
) -> list[str]:
    """Make the runs that have no record yet. Return the names of those that have none afterwards,
    because the time was over or because they failed."""
    deadline = time.monotonic() + limit_s
    records, model = out / "records", out / "model"
    records.mkdir(parents=True, exist_ok=True)
    if not (model / "config.json").exists():
        _call("base_model", "--out", str(model))

    def train(hook: str, seed: int) -> None:
        name = f"{hook}-{seed}"
        file = records / f"{name}.json"
        if file.exists() or time.monotonic() > deadline:
            return
        arguments = ["--hook", hook, "--seed", str(seed), "--model", str(model)]
        arguments += ["--folder", str(out / "runs" / name), "--json", str(file)]
        _call("training_run", *arguments)

    with ThreadPoolExecutor(parallel) as pool:
        for future in [pool.submit(train, *one) for one in planned]:
            future.result()
    names = [f"{hook}-{seed}" for hook, seed in planned]
    return [name for name in names if not (records / f"{name}.json").exists()]


def _call(module: str, *arguments: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.hack_zoo_parts.{module}", *arguments]
    subprocess.run(command, check=True, timeout=RUN_TIMEOUT_S)


def _notes(runs: Sequence[JudgedRun]) -> list[str]:
    lines = [f"* False alarm in {line}." for line in false_alarms(runs)]
    return lines + [f"* Not seen, {line}." for line in missed_expectations(runs)]


if __name__ == "__main__":
    main()
