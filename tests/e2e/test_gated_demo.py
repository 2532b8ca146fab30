"""The demo with the mode `gated`, with all its processes. The fake engine answers, which never
solves a sum, so that no version is worse than another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STEPS = 7


def test_a_gated_demo_releases_a_version_and_reports_it(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "fakevllm", "demo", "--gated", "--backend", "fake"),
            *("--steps", str(STEPS), "--run-dir", str(tmp_path / "run")),
            *("--json", str(tmp_path / "run.json")),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    gated = run["gated"]
    assert gated["released"] >= 5
    assert gated["after_released"] == 0.0
    assert gated["policy_gain"]["low"] <= 0.0 <= gated["policy_gain"]["high"]
    assert gated["choice_gain"]["mean"] == 0.0
    decisions = [record["decision"] for record in gated["releases"]]
    assert "released" in decisions and "rejected" not in decisions
    assert gated["planted"] is None
    assert "Releases" in result.stdout
