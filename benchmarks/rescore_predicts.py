"""Compare the reports of `fakevllm rescore` about five hooks with the gains of training with them.

    python -m benchmarks.rescore_predicts [--seeds 3] [--first-seed 0] [--steps 30] [--write]

For each seed, the demo trains with its own hook, and logs its requests. Then `rescore` scores the
logged requests with each of five hooks. For each hook, it prints the correlation within the groups
of the hook's rewards with the demo's rewards. It also prints this correlation without the noise of
the hook's rewards.

Then the demo trains with each of the five hooks, with another seed. The gain of a hook is the rise
of the share of right sums among the fixed questions. For each seed, the hooks are ranked by their
gain, and by the correlation without noise. The exit code is 1 if Spearman's correlation of the two
rankings is below 0.9 for any seed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import correlation, fmean

from benchmarks.learning_runs import create_parser
from benchmarks.results import conditions, markdown_table, print_table, replace_section
from fakevllm.demo.command import run_demo
from fakevllm.demo.run_state import DemoSettings

TITLE = "rescore_predicts"
SEEDS = 3
STEPS = 30
SEED_OFFSET = 1000
"""Number that is added to the seed for the runs that train with the five hooks, so that they do not
repeat the logged run."""
LEAST_RANK_CORRELATION = 0.9
RESCORE_TIMEOUT_S = 600.0

SCORES: Mapping[str, str] = {
    "right sum": "float(distance == 0)",
    "close number": "1.0 / (1.0 + distance)",
    "right sum, 3 of 10 flipped": "float((distance == 0) != is_flipped)",
    "odd or even as the sum": "float(distance % 2 == 0)",
    "wrong number": "float(distance != 0)",
}
"""Maps the name of a hook to Python code that computes the reward of an answered number. `distance`
is the difference between the number and the right sum."""
HOOK = """
import re
import zlib


def on_compute_relative_reward(valid_results, all_answers):
    return [score(*pair) for pair in zip(valid_results, all_answers)]


def score(sibling, answer):
    text = (answer["content"] or "").strip()
    number = re.search(r"(\\d+)\\.?$", text)
    if number is None or answer["finish_reason"] != "stop":
        return 0.0
    distance = abs(int(number[1]) - sibling.task.metadata["sum"])
    is_flipped = zlib.crc32(f"{{sibling.episode_id}} {{text}}".encode()) % 10 < 3
    return {score}
"""


@dataclass(frozen=True, slots=True)
class HookFigures:
    """The figures of one hook with one seed."""

    within_groups: float
    """Correlation of the hook's rewards with the demo's rewards within the groups."""
    without_noise: float
    """The same correlation without the noise of the hook's rewards."""
    gain: float
    """Rise of the share of right sums in the run that trained with the hook."""


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two series. Equal values get the mean of their ranks.
    Raises statistics.StatisticsError if all values of a series are equal.

    >>> rank_correlation([0.1, 0.2, 0.3], [5, 7, 60])
    1.0
    """
    return correlation(_ranks(x), _ranks(y))


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        fmean(rank for rank, other in enumerate(sorted(values)) if other == value)
        for value in values
    ]


def measure(folder: Path, seed: int, steps: int) -> dict[str, HookFigures]:
    """Log one run, score it with each hook, and train with each hook."""
    folder.mkdir(parents=True)
    logged = folder / "logged"
    run_demo(DemoSettings(steps, seed, "none", logged, None))
    figures: dict[str, HookFigures] = {}
    for number, (name, score) in enumerate(SCORES.items()):
        hook = folder / f"hook_{number}.py"
        hook.write_text(HOOK.format(score=score))
        correlations = rescore(hook, logged / "ledger.sqlite", folder / f"rescored_{number}.json")
        settings = DemoSettings(
            steps, seed + SEED_OFFSET, "none", folder / f"live_{number}", None, hooks=hook
        )
        outcome = run_demo(settings)
        figures[name] = HookFigures(*correlations, outcome.after - outcome.before)
    return figures


def rescore(hook: Path, ledger: Path, json_file: Path) -> tuple[float, float]:
    """Score the logged requests. Return two correlations within the groups: with the hook's noise,
    and without it."""
    command = [sys.executable, "-m", "fakevllm", "rescore", "--hooks", str(hook)]
    command += ["--ledger", str(ledger), "--json", str(json_file)]
    subprocess.run(command, check=True, timeout=RESCORE_TIMEOUT_S)
    numbers = json.loads(json_file.read_text())
    return numbers["correlation_within"], numbers["correlation_without_noise"]


def main() -> None:
    parser = create_parser(__doc__, SEEDS)
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of each run")
    args = parser.parse_args()
    run_conditions = conditions()
    rows: list[list[str]] = []
    worst = 1.0
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            figures = measure(Path(temporary) / f"seed-{seed}", seed, args.steps)
            predicted, gains = zip(
                *((one.without_noise, one.gain) for one in figures.values()), strict=True
            )
            ranks = rank_correlation(predicted, gains)
            worst = min(worst, ranks)
            rows += [
                [
                    *(str(seed), name, f"{one.within_groups:.3f}", f"{one.without_noise:.3f}"),
                    *(f"{one.gain:+.3f}", f"{ranks:.2f}"),
                ]
                for name, one in figures.items()
            ]
    header = ["seed", "hook", "correlation within groups", "without noise", "gain of training"]
    header.append("rank correlation of the last two")
    caption = (
        f"The correlations are what `fakevllm rescore` prints for the requests of a run of "
        f"{args.steps} steps with the demo's hook. The gain is the rise of the share of right sums "
        f"in a live run of as many steps with the other hook and another seed."
    )
    print_table(header, rows, caption)
    if args.write:
        replace_section(TITLE, f"{run_conditions}\n{markdown_table(header, rows)}\n{caption}")
    if worst < LEAST_RANK_CORRELATION:
        sys.exit(f"A rank correlation is {worst:.2f}, below {LEAST_RANK_CORRELATION}.")


if __name__ == "__main__":
    main()
