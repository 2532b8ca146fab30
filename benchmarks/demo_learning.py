"""Run `fakevllm demo` with several seeds, each with a control run whose weights are frozen.

    python -m benchmarks.demo_learning [--seeds 3] [--parallel 1] [--keep FOLDER] [--write]

The table shows how much the model improves with the demo's learning rate, and how steady the last
steps are.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import learning_runs
from benchmarks.results import conditions

NUM_SEEDS = 3
TITLE = "demo_learning"
LAST_STEPS = 50
"""The table shows the lowest policy mean (mean reward of all siblings of a step) among this number
of last steps. If the learning rate is too high, the reward falls in single steps at the end of a
run."""


@dataclass(frozen=True, slots=True)
class DemoRun(learning_runs.LearningRun):
    """One run of the demo with training, or one control run with frozen weights."""

    WINDOW = 10

    before: float
    """Share of right answers in the probe before training."""
    after: float
    """Share of right answers in the probe after training."""
    groups: dict[str, int]
    """Number of groups in each state, by state."""

    @classmethod
    def from_json(cls, numbers: dict[str, Any]) -> DemoRun:
        """Return the run whose numbers `fakevllm demo --json` wrote."""
        fields = ("seed", "control", "policy_mean", "wall_s", "before", "after", "groups")
        return cls(*(numbers[name] for name in fields))

    def own_cells(self) -> dict[str, str]:
        states = sorted(self.groups.items())
        return {
            f"lowest of the last {LAST_STEPS}": f"{min(self.policy_mean[-LAST_STEPS:]):.2f}",
            "probe before": f"{self.before:.3f}",
            "after": f"{self.after:.3f}",
            "steps": str(len(self.policy_mean)),
            "groups by state": ", ".join(f"{count} {state}" for state, count in states),
        }


def run(folder: Path, seed: int, control: str, arguments: Sequence[str] = ()) -> DemoRun:
    """Run the demo in the folder, with further arguments of its command, and return its
    numbers."""
    folder.mkdir(parents=True)
    numbers_file = folder / "numbers.json"
    command = [sys.executable, "-m", "fakevllm", "demo", "--run-dir", str(folder / "run")]
    command += ["--json", str(numbers_file), "--seed", str(seed), "--control", control]
    command += arguments
    with (folder / "demo.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    return DemoRun.from_json(json.loads(numbers_file.read_text()))


def main() -> None:
    parser = learning_runs.create_parser(__doc__)
    parser.set_defaults(seeds=NUM_SEEDS)
    parser.add_argument("--parallel", type=int, default=1, help="number of runs at the same time")
    parser.add_argument("--keep", type=Path, help="run in this new folder, and keep it")
    args = parser.parse_args()
    run_conditions = conditions()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        runs = learning_runs.run_with_controls(run, folder, args.seeds, args.parallel)
    learning_runs.print_runs(runs)
    if args.write:
        legend = (
            f"Start and end are means over {DemoRun.WINDOW} steps of 8 groups of 8 siblings. A "
            "probe is the share of right answers to 200 fixed questions at temperature 1. The "
            "command that runs is `fakevllm demo --seed SEED --control CONTROL`."
        )
        learning_runs.write_section(TITLE, run_conditions, runs, legend)


if __name__ == "__main__":
    main()
