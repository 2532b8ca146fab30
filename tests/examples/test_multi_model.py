"""The example with two models, run with the README's command on two servers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from examples.multi_model.run import NUM_COMPARED_STEPS, learning_curve
from tests.e2e.processes import Processes, wait_until
from tests.examples.webchat_app import ROOT

STEPS = 24


def curves(
    folder: Path, backend: list[str], *arguments: str, least: int = 1
) -> tuple[list[float], list[float]]:
    """Run the example; return the mean rewards of each step of the planner and of the executor.

    Wait until each server has trained `least` steps.
    """
    with Processes(folder) as started:
        planner, executor = (
            started.server(*backend, folder=name) for name in ("planner", "executor")
        )
        command = [sys.executable, "-m", "examples.multi_model.run", *arguments]
        command += ["--planner", planner.url, "--executor", executor.url]
        played = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        print(played.stdout)
        urls = planner.url, executor.url
        wait_until(
            lambda: all(len(learning_curve(url)) >= least for url in urls),
            30,
            f"{least} steps each",
        )
        return learning_curve(planner.url), learning_curve(executor.url)


@pytest.mark.slow
def test_each_batch_trains_one_step_of_both_models(tmp_path: Path) -> None:
    small = ("--steps", "2", "--batch-size", "2", "--num-repeat", "2")
    for means in curves(tmp_path, ["--backend", "fake"], *small, least=2):
        assert len(means) == 2


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_both_models_learn_and_neither_learns_without_updates(tmp_path: Path) -> None:
    demo = ["--backend", "embedded", "--model", "demo"]
    for means in curves(tmp_path / "learns", demo, "--steps", str(STEPS)):
        assert fmean(means[-NUM_COMPARED_STEPS:]) - fmean(means[:NUM_COMPARED_STEPS]) > 0.15
    frozen = ("--steps", "10", "--control", "frozen")
    for means in curves(tmp_path / "frozen", demo, *frozen):
        assert abs(fmean(means[-NUM_COMPARED_STEPS:]) - fmean(means[:NUM_COMPARED_STEPS])) < 0.15
