"""The math example's README, by its command: the demo model learns to use its calculator."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pytest

from benchmarks.run_logs import steps_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
NUM_STEPS = 20


class Run(NamedTuple):
    rise: float
    """Of the last five steps' mean reward over the first five's, 320 episodes each."""
    before: float
    after: float


def run_of(folder: Path, control: str) -> Run:
    """The example as it is, but for the control."""
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
    told = re.search(r"64 tasks: ([\d.]+) before, ([\d.]+) after", played.stdout)
    assert told is not None
    means = [step["metrics"]["reward_mean"] for step in steps_of(folder / "runs/math")]
    assert len(means) == NUM_STEPS
    return Run(fmean(means[-5:]) - fmean(means[:5]), float(told[1]), float(told[2]))


def test_the_demo_model_learns_to_call_and_without_updates_nothing_is_learnt(
    tmp_path: Path,
) -> None:
    learns, frozen = run_of(tmp_path / "learns", "none"), run_of(tmp_path / "frozen", "frozen")
    assert learns.rise > 0.12 and learns.after > 0.9
    assert abs(frozen.rise) < 0.1 and frozen.after < 0.85
