"""Train the werewolves example as its README does, and run a frozen control.

    python -m benchmarks.werewolves [--seeds 3] [--steps 30] [--write]

Each run starts a server with the demo model, and the script `examples/werewolves/train.py`. The
script plays the same 200 games before and after the training. The control run makes fewer steps,
because its weights do not change. The exit code is 1 if the share of right targets did not rise.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from benchmarks import learning_runs
from benchmarks.results import ROOT, conditions, markdown_table, replace_section
from tests.e2e.processes import Processes

STEPS = 30
FROZEN_STEPS = 10
TITLE = "werewolves"
EVALUATION = re.compile(r"^(before|after): +won ([\d.]+), aim ([\d.]+)$", re.M)
STEP = re.compile(r"^step \d+: aim ([\d.]+)$", re.M)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures of the evaluation games at one moment."""

    won: float
    """Share of games that the trained side won."""
    aim: float
    """Mean share of the trained side's moves that named the right target."""


@dataclass(frozen=True, slots=True)
class WerewolvesRun(learning_runs.LearningRun):
    """One training run of the werewolves, or its frozen control."""

    WINDOW = 5  # 1,280 moves

    before: Evaluation
    after: Evaluation

    @property
    def won_change(self) -> float:
        return self.after.won - self.before.won

    @property
    def aim_change(self) -> float:
        return self.after.aim - self.before.aim

    def own_cells(self) -> dict[str, str]:
        return {
            "steps": str(len(self.policy_mean)),
            "won before": f"{self.before.won:.3f}",
            "won after": f"{self.after.won:.3f}",
            "aim before": f"{self.before.aim:.3f}",
            "aim after": f"{self.after.aim:.3f}",
        }


def run(folder: Path, seed: int, control: str, *, steps: int = STEPS) -> WerewolvesRun:
    """Start the server and the training script, and stop the server at the end.

    Raises AssertionError with the script's output if the script fails.
    """
    started_s = time.monotonic()
    steps = steps if control == "none" else min(steps, FROZEN_STEPS)
    with Processes(folder) as started:
        server = started.server("--backend", "embedded", "--model", "demo", "--seed", str(seed))
        command = [sys.executable, "-m", "examples.werewolves.train", "--swarm-url", server.url]
        command += ["--small", "--steps", str(steps), "--seed", str(seed), "--control", control]
        script = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert script.returncode == 0, script.stdout + script.stderr
    return read_run(script.stdout, seed, control, time.monotonic() - started_s)


def read_run(output: str, seed: int, control: str, wall_s: float) -> WerewolvesRun:
    """Return the run whose script printed `output`."""
    evaluations = {
        label: Evaluation(float(won), float(aim)) for label, won, aim in EVALUATION.findall(output)
    }
    means = [float(aim) for aim in STEP.findall(output)]
    before, after = evaluations["before"], evaluations["after"]
    return WerewolvesRun(seed, control, means, wall_s, before, after)


def summary_rows(runs: Sequence[WerewolvesRun]) -> list[list[str]]:
    """Return one row for the training runs and one for the controls.

    A cell has the mean and the standard deviation over the seeds.
    """
    rows: list[list[str]] = []
    for label, control in (("yes", "none"), ("no (frozen)", "frozen")):
        own = [one for one in runs if one.control == control]
        rows.append(
            [
                label,
                _mean_and_spread([one.end - one.start for one in own]),
                _mean_and_spread([one.won_change for one in own]),
                _mean_and_spread([one.aim_change for one in own]),
            ]
        )
    return rows


def verdict(runs: Sequence[WerewolvesRun]) -> str:
    """Return a text that says for the games won and for the aim whether every training run rose
    more than every control run."""
    return " ".join(
        f"{name} {'rose' if has_risen(trained, frozen) else 'did not rise'}: the training runs "
        f"changed by {min(trained):+.3f} to {max(trained):+.3f}, and the controls by "
        f"{min(frozen):+.3f} to {max(frozen):+.3f}."
        for name, trained, frozen in (
            ("The aim", *_changes(runs, "aim_change")),
            ("The share of games won", *_changes(runs, "won_change")),
        )
    )


def has_risen(trained: Sequence[float], frozen: Sequence[float]) -> bool:
    """Return True if the figure rose in every training run, and rose more than in every control
    run."""
    return min(trained) > max(0.0, *frozen)


def _changes(runs: Sequence[WerewolvesRun], name: str) -> tuple[list[float], list[float]]:
    trained = [getattr(one, name) for one in runs if one.control == "none"]
    return trained, [getattr(one, name) for one in runs if one.control != "none"]


def _mean_and_spread(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{fmean(values):+.3f}{spread}"


def main() -> None:
    parser = learning_runs.create_parser(__doc__)
    parser.set_defaults(seeds=3)
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of each run")
    args = parser.parse_args()
    run_conditions = conditions()

    def run_seed(folder: Path, seed: int, control: str) -> WerewolvesRun:
        return run(folder, seed, control, steps=args.steps)

    with tempfile.TemporaryDirectory(prefix="fakevllm-") as name:
        runs = learning_runs.run_with_controls(run_seed, Path(name), args.seeds)
    learning_runs.print_runs(runs)
    header = ["updates", "change of the policy mean", "of the games won", "of the aim"]
    summary = markdown_table(header, summary_rows(runs))
    print(f"\n{summary}\n{verdict(runs)}")
    if args.write:
        table = markdown_table(*learning_runs.create_table(runs))
        replace_section(TITLE, "\n".join([run_conditions, table, summary, _legend(runs)]))
    if not has_risen(*_changes(runs, "aim_change")):
        sys.exit(1)


def _legend(runs: Sequence[WerewolvesRun]) -> str:
    return (
        f"{verdict(runs)} A value after ± is the standard deviation between seeds. The policy mean "
        f"is the share of right targets among the moves that trained, over {WerewolvesRun.WINDOW} "
        "steps of 32 prompts and 8 answers. Games won and aim are from the same 200 games before "
        "and after. There, one share of games won has a standard error of .035."
    )


if __name__ == "__main__":
    main()
