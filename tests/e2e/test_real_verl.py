"""Tests of the demo with vLLM as the sampler and verl as the trainer.

Processes are killed with SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks.run_log_reader import read_log_entries, surviving_steps
from fakevllm_server.backends.process.procfs import SESSION, live_processes
from tests.contract.trainers import ray_workers
from tests.e2e.processes import wait_until
from tests.e2e.test_real_engines import READY_TIMEOUT_S

pytestmark = [pytest.mark.real, pytest.mark.slow]


@dataclass(frozen=True, slots=True)
class Demo:
    """One running `fakevllm demo`."""

    process: subprocess.Popen[bytes]
    folder: Path
    json_file: Path
    log_file: Path

    @property
    def entries(self) -> list[Any]:
        return read_log_entries(self.folder)

    @property
    def steps(self) -> list[Any]:
        return [entry for entry in self.entries if entry["kind"] == "step"]

    def wait_for_step(self, step: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.log_file.read_text()
            return any(entry["step"] >= step for entry in self.steps)

        wait_until(reached, READY_TIMEOUT_S, f"step {step}")

    def outcome(self, timeout_s: float) -> Any:
        """Wait for the demo's successful end, and return its result."""
        assert self.process.wait(timeout=timeout_s) == 0, self.log_file.read_text()
        outcome = json.loads(self.json_file.read_text())
        print({key: outcome[key] for key in ("before", "after", "wall_s", "restarts", "groups")})
        print(" ".join(f"{value:.2f}" for value in outcome["policy_mean"]))
        return outcome


@contextmanager
def demo(folder: Path, *arguments: str) -> Generator[Demo]:
    """Run a demo, and stop it and its processes at the end of the block if they still run."""
    run = folder / "run"
    command = [sys.executable, "-m", "fakevllm", "demo", *arguments]
    command += ["--run-dir", str(run), "--json", str(folder / "result.json")]
    with (folder / "demo.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield Demo(process, run, folder / "result.json", folder / "demo.log")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        for file in sorted(run.glob("*.log")):
            print(f"--- {file}", *file.read_text(errors="replace").splitlines()[-40:], sep="\n")


STEPS = 14
KILL_AFTER = 11
CHECKPOINT = 10
"""The last checkpoint before the kill."""


@pytest.mark.timeout(700)
def test_with_verl_the_reward_rises_although_a_ray_worker_is_killed(tmp_path: Path) -> None:
    with demo(tmp_path, "--backend", "verl", "--steps", str(STEPS)) as running:
        running.wait_for_step(KILL_AFTER)
        (worker,) = ray_workers(live_processes(SESSION, trainer_of(running)))
        os.kill(worker, signal.SIGKILL)
        outcome = running.outcome(timeout_s=400)
    check_probabilities(running)
    check_recovery(running)
    assert outcome["after"] > outcome["before"]
    assert mean(outcome["policy_mean"][-3:]) > mean(outcome["policy_mean"][:3])


def check_probabilities(running: Demo) -> None:
    """Check that vLLM's probabilities of the first step's tokens are those of verl."""
    first, *_ = metrics = [entry["metrics"] for entry in running.steps]
    print("prob_diff_max", " ".join(f"{step['prob_diff_max']:.1e}" for step in metrics))
    assert abs(first["ppo_kl"]) < 1e-6
    assert first["mismatch"] < 1e-6, "mean of |vLLM's log-probability - verl's|"
    assert first["prob_diff_max"] < 2e-6, "the largest of about 400 differences, in float32"


def check_recovery(running: Demo) -> None:
    """Check that training continued from the checkpoint, with every step and group once."""
    restored = [entry for entry in running.entries if entry["kind"] == "restored"]
    assert [entry["step"] for entry in restored] == [CHECKPOINT]
    survivors = surviving_steps(read_log_entries(running.folder))
    trained = [group["group_id"] for entry in survivors for group in entry["groups"]]
    assert len(trained) == len(set(trained))
    assert [entry["step"] for entry in survivors] == list(range(1, STEPS + 1))
    batches = {
        (entry["step"], tuple(group["group_id"] for group in entry["groups"]))
        for entry in running.steps
    }
    assert len(batches) == STEPS, "a repeated step had other groups than before"


def trainer_of(running: Demo) -> int:
    """Return the process id of this demo's verl trainer, which is the leader of its session."""
    (trainer,) = [
        pid
        for pid, command in commands()
        if "-m\0fakevllm_server.backends.verl\0" in command and str(running.folder) in command
    ]
    return trainer


def commands() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                yield int(folder.name), (folder / "cmdline").read_bytes().decode()
            except OSError:
                continue
