"""The demo goes on when its processes are killed, and nothing is trained twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.run_logs import entries_of, steps_of, surviving_steps
from tests.e2e.processes import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

STEPS = 40


def step_of(run_dir: Path) -> int:
    return max((entry["step"] for entry in steps_of(run_dir)), default=0)


def pids(run_dir: Path, module: str) -> Iterator[int]:
    """Of our own processes that work on this run and no other."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_bytes().decode()
            except OSError:
                continue
            if str(run_dir) in command and f"-m\0{module}\0" in command:
                yield int(folder.name)


def test_a_demo_whose_server_and_proxy_are_killed_finishes_and_trains_nothing_twice(
    tmp_path: Path,
) -> None:
    run_dir, result = tmp_path / "run", tmp_path / "result.json"
    command = [sys.executable, "-m", "fakevllm", "demo", "--steps", str(STEPS)]
    command += ["--run-dir", str(run_dir), "--json", str(result)]
    with (tmp_path / "demo.log").open("w") as log:
        demo = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            for at_step, module in ((12, "fakevllm_server\0start"), (25, "fakevllm\0serve")):
                wait_until(lambda step=at_step: step_of(run_dir) >= step, 120, f"step {at_step}")
                (pid,) = pids(run_dir, module)
                os.kill(pid, signal.SIGKILL)
            assert demo.wait(timeout=200) == 0, (tmp_path / "demo.log").read_text()
        finally:
            demo.kill()
            demo.wait()
    outcome = json.loads(result.read_text())
    print(f"before {outcome['before']}, after {outcome['after']}, groups {outcome['groups']}")
    assert outcome["restarts"] == 2
    assert "lost" not in outcome["groups"]
    log_entries = entries_of(run_dir)
    trained = [
        g["group_id"] for entry in surviving_steps(entries_of(run_dir)) for g in entry["groups"]
    ]
    assert len(trained) == len(set(trained)) == outcome["groups"]["trained"]
    assert step_of(run_dir) == STEPS
    assert outcome["after"] > outcome["before"]
    measured = [entry["metrics"] for entry in log_entries if entry.get("metrics")]
    assert len(measured) >= STEPS
    assert {metrics["token_fidelity"] for metrics in measured} == {1.0}
    assert all(metrics["untrainable_tokens"] == 0 for metrics in measured)
    assert not any("too_far" in metrics for metrics in measured)
    assert measured[-1]["forest_speedup"] > 0 and measured[-1]["rho"] > 1
    steps_told = (run_dir / "server.log").read_text().count("fidelity 1,")
    assert steps_told >= STEPS
