"""The math example, run with the README's command: the demo model learns to use the calculator."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pytest

from benchmarks.run_log_reader import read_step_entries

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
NUM_STEPS = 20


class Run(NamedTuple):
    rise: float
    """Mean reward of the last five steps minus that of the first five, each from 320 episodes."""
    before: float
    after: float


def run_example(folder: Path, control: str) -> Run:
    """Run a copy of the example with this setting of `control`."""
    example = folder / "math"
    example.mkdir(parents=True)
    for file in (ROOT / "examples/math").iterdir():
        if file.is_file():
            (example / file.name).write_text(file.read_text())
    text = (example / "math.yaml").read_text().replace("job:\n", f"job:\n  control: {control}\n")
    (example / "math.yaml").write_text(text)
    command = [sys.executable, "-m", "fakevllm", "train", "--conf", "math/math.yaml"]
    played = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    print(control, played.stdout)
    match = re.search(r"64 tasks: ([\d.]+) before, ([\d.]+) after", played.stdout)
    assert match is not None
    means = [step["metrics"]["reward_mean"] for step in read_step_entries(folder / "runs/math")]
    assert len(means) == NUM_STEPS
    return Run(fmean(means[-5:]) - fmean(means[:5]), float(match[1]), float(match[2]))


def test_the_demo_model_learns_to_call_the_calculator_and_learns_nothing_without_updates(
    tmp_path: Path,
) -> None:
    learns, frozen = (
        run_example(tmp_path / "learns", "none"),
        run_example(tmp_path / "frozen", "frozen"),
    )
    assert learns.rise > 0.12 and learns.after > 0.9
    assert abs(frozen.rise) < 0.1 and frozen.after < 0.85
