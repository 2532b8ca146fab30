"""Reads what three demo runs wrote and fails where one did not show what it should."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import sys
from pathlib import Path
from typing import Any


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
        print(" ", truth(steps_of(folder / name)))
    failures = [claim for claim, holds in claims(runs) if not holds]
    for name in runs:
        measured = steps_of(folder / name)
        failures += [f"{name}: {claim}" for claim, holds in truths(measured) if not holds]
    if failures:
        sys.exit("the demo does not show: " + "; ".join(failures))


def claims(runs: dict[str, dict[str, Any]]) -> list[tuple[str, bool]]:
    rise = {name: run["after"] - run["before"] for name, run in runs.items()}
    learns = runs["learns"]
    return [
        ("before <= 0.6", learns["before"] <= 0.6),
        ("after >= 0.9", learns["after"] >= 0.9),
        ("one policy mean for every step", len(learns["policy_mean"]) == learns["steps"]),
        ("frozen stays within 0.1", abs(rise["frozen"]) <= 0.1),
        ("shuffled rises by at most 0.1", rise["shuffled"] <= 0.1),
        ("no process had to be restarted", not any(run["restarts"] for run in runs.values())),
    ]


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    """What each step of the run's log measured."""
    with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        rows = journal.execute("select entry_json from entries order by seq").fetchall()
    entries = [json.loads(row[0]) for row in rows]
    return [entry["metrics"] for entry in entries if entry["kind"] == "step"]


def truths(measured: list[dict[str, float]]) -> list[tuple[str, bool]]:
    return [
        ("steps were made", bool(measured)),
        (
            "token_fidelity is 1.0 in every step",
            all(metrics["token_fidelity"] == 1.0 for metrics in measured),
        ),
        ("no step was too far from its engine", not any("too_far" in one for one in measured)),
    ]


def truth(measured: list[dict[str, float]]) -> str:
    def least(name: str) -> float:
        return min(found(name), default=math.nan)

    def found(name: str) -> list[float]:
        """Where it was measured; what is not finite is told by name."""
        return [float(metrics[name]) for metrics in measured if name in metrics]

    largest = max(found("mismatch_k3"), default=math.nan)
    last = measured[-1] if measured else {}
    return (
        f"token_fidelity {least('token_fidelity'):g}, mismatch_k3 at most {largest:.2g}, "
        f"ess at least {least('ess'):.3f}, rho {last.get('rho', 0):.2f}, "
        f"forest_speedup {last.get('forest_speedup', 0):.2f}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
