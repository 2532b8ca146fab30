"""Check the results of three demo runs: the demo must learn, and its two controls must not."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import statistics
import sys
from pathlib import Path
from typing import Any

LAST_STEPS = 20
"""Number of steps at the end of a run whose mean is checked. The weights change with each step, so
one version alone may be worse than its neighbors by chance."""


def main(folder: Path) -> None:
    runs: dict[str, dict[str, Any]] = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in ("learns", "frozen", "shuffled")
    }
    for name, run in runs.items():
        print(
            f"{name}: before {run['before']:.3f}, after {run['after']:.3f}, "
            f"{run['steps']} steps, {run['wall_s']:.0f} s, groups {run['groups']}"
        )
        print(" policy mean", *(f"{mean:.2f}" for mean in run["policy_mean"]))
        print(" ", summarize(read_step_metrics(folder / name)))
    failures = [claim for claim, holds in check_outcomes(runs) if not holds]
    for name in runs:
        checks = check_steps(read_step_metrics(folder / name))
        failures += [f"{name}: {claim}" for claim, holds in checks if not holds]
    if failures:
        sys.exit("The demo failed these checks: " + "; ".join(failures))


def check_outcomes(runs: dict[str, dict[str, Any]]) -> list[tuple[str, bool]]:
    """Return the claims about the runs' outcomes, and whether each holds."""
    rise = {name: run["after"] - run["before"] for name, run in runs.items()}
    learns = runs["learns"]
    return [
        ("before <= 0.6", learns["before"] <= 0.6),
        ("after >= 0.8", learns["after"] >= 0.8),
        (f"the last {LAST_STEPS} steps have a mean >= 0.9", mean_of_last_steps(learns) >= 0.9),
        ("one policy mean for every step", len(learns["policy_mean"]) == learns["steps"]),
        ("frozen stays within 0.1", abs(rise["frozen"]) <= 0.1),
        ("shuffled rises by at most 0.1", rise["shuffled"] <= 0.1),
        ("no process had to be restarted", not any(run["restarts"] for run in runs.values())),
    ]


def mean_of_last_steps(run: dict[str, Any]) -> float:
    """Return the share of right answers to the requests of the last steps."""
    return statistics.fmean(run["policy_mean"][-LAST_STEPS:])


def read_step_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Return the metrics of each step in the run log."""
    with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        rows = journal.execute("select entry_json from entries order by seq").fetchall()
    entries = [json.loads(row[0]) for row in rows]
    return [entry["metrics"] for entry in entries if entry["kind"] == "step"]


def check_steps(steps: list[dict[str, float]]) -> list[tuple[str, bool]]:
    """Return the claims about the metrics of a run's steps, and whether each holds."""
    return [
        ("steps were taken", bool(steps)),
        (
            "token_fidelity is 1.0 in every step",
            all(metrics["token_fidelity"] == 1.0 for metrics in steps),
        ),
        ("no step exceeded the mismatch limit", not any("too_far" in step for step in steps)),
    ]


def summarize(steps: list[dict[str, float]]) -> str:
    """Return the main metrics of a run in one line."""

    def values(name: str) -> list[float]:
        """Return a metric's values. A value that is not finite is a string in the run log."""
        return [float(metrics[name]) for metrics in steps if name in metrics]

    def least(name: str) -> float:
        return min(values(name), default=math.nan)

    largest = max(values("mismatch_k3"), default=math.nan)
    last = steps[-1] if steps else {}
    return (
        f"token_fidelity {least('token_fidelity'):g}, mismatch_k3 at most {largest:.2g}, "
        f"ess at least {least('ess'):.3f}, rho {last.get('rho', 0):.2f}, "
        f"forest_speedup {last.get('forest_speedup', 0):.2f}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
