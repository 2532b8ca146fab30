"""Planner and executor by their README's command, each on a server of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from examples.multi_model.run import LAST, curve
from tests.e2e.processes import Processes, wait_until
from tests.examples.webchats import ROOT

STEPS = 24


def curves(
    folder: Path, backend: list[str], *arguments: str, least: int = 1
) -> tuple[list[float], list[float]]:
    """The mean rewards of the planner's steps, and of the executor's, `least` or more of each."""
    with Processes(folder) as started:
        planner, executor = (
            started.server(*backend, folder=name) for name in ("planner", "executor")
        )
        command = [sys.executable, "-m", "examples.multi_model.run", *arguments]
        command += ["--planner", planner.url, "--executor", executor.url]
        played = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        print(played.stdout)
        urls = planner.url, executor.url
        wait_until(lambda: all(len(curve(url)) >= least for url in urls), 30, f"{least} steps each")
        return curve(planner.url), curve(executor.url)


@pytest.mark.slow
def test_a_batch_of_both_trains_a_step_of_each(tmp_path: Path) -> None:
    small = ("--steps", "2", "--batch-size", "2", "--num-repeat", "2")
    for means in curves(tmp_path, ["--backend", "fake"], *small, least=2):
        assert len(means) == 2


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_both_models_learn_and_without_updates_neither_does(tmp_path: Path) -> None:
    demo = ["--backend", "embedded", "--model", "demo"]
    for means in curves(tmp_path / "learns", demo, "--steps", str(STEPS)):
        assert fmean(means[-LAST:]) - fmean(means[:LAST]) > 0.15
    frozen = ("--steps", "10", "--control", "frozen")
    for means in curves(tmp_path / "frozen", demo, *frozen):
        assert abs(fmean(means[-LAST:]) - fmean(means[:LAST])) < 0.15
