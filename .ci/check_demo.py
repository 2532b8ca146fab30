"""Reads what three demo runs wrote and fails where one did not show what it should."""

from __future__ import annotations

import json
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
    failures = [claim for claim, holds in claims(runs) if not holds]
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
