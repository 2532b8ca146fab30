"""The check of a GPU machine, on a CPU with tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
CPU = ("--device", "cpu", "--tiny")


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": ":".join([".", "server", "adapters", "tests"])}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_each_part_has_a_log_and_a_place_in_the_summary(tmp_path: Path) -> None:
    done = check(*CPU, "--out", str(tmp_path), "--parts", "demo,float32,decode")
    assert done.returncode == 0, done.stdout + done.stderr

    summary = json.loads((tmp_path / "check.json").read_text())
    assert [part["name"] for part in summary["parts"]] == ["demo", "float32", "decode"]
    assert {part["exit_code"] for part in summary["parts"]} == {0}
    assert summary["is_cpu"]
    table = (tmp_path / "check.md").read_text()
    assert "This ran on a CPU" in table
    assert table.count("| passed |") == 3
    assert json.loads((tmp_path / "demo.json").read_text())["steps"] == 3
    assert "seed 0: sampled" in (tmp_path / "float32.log").read_text()
    assert "embedded" in (tmp_path / "decode.log").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_message_names_the_flags_for_a_cpu(tmp_path: Path) -> None:
    done = check("--out", str(tmp_path))
    assert done.returncode == 2
    assert "finds no CUDA GPU. Use --device cpu --tiny" in done.stderr


def test_an_unknown_part_is_refused_and_the_known_ones_are_named(tmp_path: Path) -> None:
    done = check(*CPU, "--out", str(tmp_path), "--parts", "verl")
    assert done.returncode == 2
    assert "unknown parts verl: choose from tests, demo, float32, forest, decode" in done.stderr
