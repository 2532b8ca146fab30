"""The demo with the mode `gated`, with all its processes. The fake engine answers, which never
solves a sum, so that no version is worse than another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.preloaded_python import PRELOADED_PYTHON

pytestmark = pytest.mark.slow

STEPS = 7


def test_a_gated_demo_releases_a_version_and_reports_it(tmp_path: Path) -> None:
    command = ["-m", "fakevllm", "demo", "--gated", "--backend", "fake", "--steps", str(STEPS)]
    command += ["--run-dir", "run", "--json", "run.json"]
    result = PRELOADED_PYTHON.run(command, tmp_path, timeout_s=120)
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
