"""Train the math example as its README does, or run it with frozen weights as a control.

`benchmarks.track` uses this module. `tests/examples/test_math_learns.py` checks that the figures
are within their limits.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import learning_runs
from benchmarks.results import ROOT
from benchmarks.run_log_reader import read_step_entries

EVALUATION = re.compile(r"64 tasks: mean reward ([\d.]+) before training, ([\d.]+) after")


@dataclass(frozen=True, slots=True)
class MathRun(learning_runs.LearningRun):
    """One run of the math example: a training run, or a control run with frozen weights."""

    WINDOW = 5  # 320 episodes

    before: float
    """Share of right answers before training."""
    after: float
    """Share of right answers after training."""

    def own_cells(self) -> dict[str, str]:
        return {"before": f"{self.before:.3f}", "after": f"{self.after:.3f}"}


def run(folder: Path, seed: int, control: str) -> MathRun:
    """Run a copy of the example in the folder, with the given seed and the given setting
    `control`."""
    started_s = time.monotonic()
    example = folder / "math"
    example.mkdir(parents=True)
    for file in (ROOT / "examples/math").iterdir():
        if file.is_file():
            (example / file.name).write_text(file.read_text())
    settings = f"job:\n  control: {control}\n  seed: {seed}\n"
    text = (example / "math.yaml").read_text().replace("job:\n", settings)
    (example / "math.yaml").write_text(text)
    command = [sys.executable, "-m", "fakevllm", "train", "--conf", "math/math.yaml"]
    played = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert played.returncode == 0, played.stdout + played.stderr
    match = EVALUATION.search(played.stdout)
    assert match is not None, played.stdout
    means = [step["metrics"]["reward_mean"] for step in read_step_entries(folder / "runs/math")]
    wall_s = time.monotonic() - started_s
    return MathRun(seed, control, means, wall_s, float(match[1]), float(match[2]))
