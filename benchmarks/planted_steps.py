"""Run `fakevllm demo --gated` with planted bad steps and several seeds.

    python -m benchmarks.planted_steps
        [--seeds 10] [--first-seed 0] [--parallel 2] [--keep FOLDER] [--write]

In ten steps, the rewards reach the trainer with the opposite sign. The table shows whether training
went back, after how many sessions, and how many answers came from versions of the planted steps.
The exit code is 1 if a claim of the demo does not hold in one of the runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.arm_answers import count_answers
from benchmarks.results import conditions, markdown_table, print_table, replace_section
from fakevllm.demo.gate_settings import PLANTED_FILE, release_section

TITLE = "planted_steps"
SEEDS = 10
STEPS = 60
FIRST_PLANTED = 25
DEMO_TIMEOUT_S = 1200.0
EXCESS = 0.02
"""Number by which the share of answers from planted versions may be larger than `canary_share`."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlantedRun:
    """One run of the demo with planted steps."""

    seed: int
    outcome: Json
    """The numbers of the mode `gated` that `fakevllm demo --json` writes."""
    num_answers: int
    """Number of the app's answers from the first planted step until training went back, or until
    the end of the run."""
    num_training: int
    """Number of these answers that came from the training arm, which gets the newest version."""
    wall_s: float

    @property
    def planted(self) -> Json:
        return self.outcome["planted"]

    @property
    def training_share(self) -> float:
        return self.num_training / max(self.num_answers, 1)

    @property
    def failed(self) -> list[str]:
        """The claims that do not hold."""
        claims: dict[str, bool] = self.planted["claims"]
        return [claim for claim, holds in claims.items() if not holds]

    def cells(self) -> list[str]:
        """Return the row of the table."""
        planted, change = self.planted, self.planted["released_arm"]
        means = ["-", "-"]
        if change is not None:
            means = [f"{change[name]:.3f}" for name in ("before", "since")]
        return [
            str(self.seed),
            str(planted["rejected"] or "none"),
            str("-" if planted["restored"] is None else planted["restored"]),
            str(planted["sessions_until_return"] or "-"),
            f"{self.training_share:.3f}",
            *means,
            f"{self.outcome['after_released']:.3f}",
            "; ".join(self.failed) or "all",
            f"{self.wall_s:.0f}",
        ]


HEADER = [
    "seed",
    "rejected version",
    "back to",
    "sessions until then",
    "share of the training arm until then",
    "released arm before",
    "and since",
    "its probe at the end",
    "claims that hold",
    "wall s",
]


def run(folder: Path, seed: int) -> PlantedRun:
    """Run the demo in the folder, and return the numbers that it has measured. If the demo wrote no
    numbers, raise RuntimeError with the end of the demo's log. A claim that does not hold raises no
    error."""
    folder.mkdir(parents=True)
    run_dir, numbers_file, log_file = folder / "run", folder / "numbers.json", folder / "demo.log"
    command = [sys.executable, "-m", "fakevllm", "demo", "--gated", "--steps", str(STEPS)]
    command += ["--plant-bad-step", str(FIRST_PLANTED), "--seed", str(seed)]
    command += ["--run-dir", str(run_dir), "--json", str(numbers_file)]
    with log_file.open("w") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=DEMO_TIMEOUT_S)
    if not numbers_file.exists():
        raise RuntimeError(log_file.read_text()[-2000:])
    numbers: Json = json.loads(numbers_file.read_text())
    answers = _answers(run_dir, numbers["gated"])
    return PlantedRun(seed, numbers["gated"], *answers, numbers["wall_s"])


def _answers(run_dir: Path, outcome: Json) -> tuple[int, int]:
    """Return (answers, answers of the training arm): the numbers of the app's answers from the
    first planted step until training went back."""
    began_at: float = json.loads((run_dir / PLANTED_FILE).read_text())["began_at"]
    returns = (
        record["time_s"]
        for record in outcome["releases"]
        if record["time_s"] >= began_at and "restored" in record["evidence"]
    )
    until = next(returns, float("inf"))
    return count_answers(run_dir / "ledger.sqlite", began_at, until)


def training_share(runs: Sequence[PlantedRun]) -> float:
    """Return the share of the training arm in the answers of all runs together. Sessions get their
    arm by a hash, so the share of a single run varies by chance."""
    return sum(one.num_training for one in runs) / max(sum(one.num_answers for one in runs), 1)


def summary(runs: Sequence[PlantedRun]) -> str:
    """Return a text with the results of all runs together."""
    sessions = [one.planted["sessions_until_return"] for one in runs]
    returned = [count for count in sessions if count is not None]
    text = f"Training went back in {len(returned)} of {len(runs)} runs"
    if returned:
        text += f", after {median(returned):.0f} sessions in the median and {max(returned)} at most"
    return f"{text}. Until then, {training_share(runs):.1%} of all answers were the training arm's."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them")
    parser.add_argument("--parallel", type=int, default=1, help="number of runs at the same time")
    parser.add_argument("--keep", type=Path, help="run in this new folder, and keep it")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    run_conditions = conditions()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.parallel) as pool:
        folder: Path = args.keep or Path(temporary)
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        running = [pool.submit(run, folder / f"seed-{seed}", seed) for seed in seeds]
        runs = [future.result() for future in running]
    rows = [one.cells() for one in runs]
    print_table(HEADER, rows, summary(runs))
    if args.write:
        legend = (
            f"{summary(runs)} Ten steps from step {FIRST_PLANTED} on train with the opposite "
            "rewards. The released arm's mean reward is that of the 100 sessions before the "
            "planted steps, and of the later ones up to 100 sessions after training went back. A "
            "version that stays undecided until training "
            "has recovered is not rejected, and the claim that training went back then fails."
        )
        table = markdown_table(HEADER, rows)
        replace_section(TITLE, f"{run_conditions}\n{table}\n{legend}")
    if any(one.failed for one in runs):
        sys.exit("Not all claims hold in all runs.")
    limit = float(str(release_section(Path())["canary_share"])) + EXCESS
    if training_share(runs) > limit:
        sys.exit(f"More than {limit:.0%} of the answers came from the training arm.")


if __name__ == "__main__":
    main()
