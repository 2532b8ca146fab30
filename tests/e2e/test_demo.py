"""A test of the demo whose processes are killed: no group is lost or trained twice."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

from benchmarks.demo_kills import run_demo
from benchmarks.demo_parts.process_kills import Victim, plan_kills
from benchmarks.run_log_reader import read_log_entries, read_step_entries

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in Linux's /proc"),
]

STEPS = 60
LAST_KILL = 52
"""The latest step of a planned kill.

A kill may happen later than planned, and the run must still reach its end."""
SEED = 3
"""Seed of the kills: two during the start, and four in the second half."""
KILLS_OF_EACH = 2


def test_a_demo_whose_processes_are_killed_loses_no_group_and_trains_none_twice(
    tmp_path: Path,
) -> None:
    kills = plan_kills(random.Random(SEED), LAST_KILL, KILLS_OF_EACH)
    run = asyncio.run(run_demo(tmp_path / "demo", 0, STEPS, kills, timeout_s=880))
    outcome = run.outcome
    print(f"before {outcome['before']}, after {outcome['after']}, groups {outcome['groups']}")
    print(f"{len(run.requests)} requests beside, killed: {run.kills}")
    findings = run.checks()
    assert [f"{one.claim}: {one.figures}" for one in findings if one.holds is False] == []
    assert len(run.kills) == len(kills)
    num_restarts = sum(kill.victim is not Victim.ENGINE for kill in run.kills)
    assert outcome["restarts"] == num_restarts
    assert outcome["after"] > outcome["before"]
    assert max(entry["step"] for entry in read_step_entries(run.folder)) == STEPS
    check_measures(run.folder)


def check_measures(run_dir: Path) -> None:
    """Check the metrics of each step, also of steps that a killed process made."""
    measured = [entry["metrics"] for entry in read_log_entries(run_dir) if entry.get("metrics")]
    assert len(measured) >= STEPS
    assert {metrics["token_fidelity"] for metrics in measured} == {1.0}
    assert all(metrics["untrainable_tokens"] == 0 for metrics in measured)
    assert not any("too_far" in metrics for metrics in measured)
    assert measured[-1]["forest_speedup"] > 0 and measured[-1]["rho"] > 1
    num_logged = (run_dir / "server.log").read_text().count("fidelity 1,")
    assert num_logged >= STEPS
