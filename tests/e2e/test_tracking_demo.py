"""A short demo, seen in TensorBoard's files and in wandb's offline files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_commands import run
from tests.swarm_server.curves.readings import Charts
from tests.swarm_server.curves.wandb_rows import WandbRows, is_same, needs_wandb

COMPLETIONS = "completions"
STEPS = 2


@needs_wandb
def test_a_demo_has_the_same_curves_and_samples_in_tensorboard_and_in_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = ["--track", "tensorboard", "--track", "wandb", "--track-samples", "2"]
    flags += ["--track-samples-every", "1", "--steps", str(STEPS), "--run-dir", "run"]
    done = run(tmp_path, "-m", "fakevllm", "demo", *flags, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    charts, rows = Charts(tmp_path / "run"), WandbRows(tmp_path / "run")
    assert charts.steps() == list(range(1, STEPS + 1))
    in_wandb, in_tensorboard = rows.points(), charts.all_points()
    assert in_wandb.keys() == in_tensorboard.keys()
    for name in in_wandb:
        pairs = zip(in_wandb[name], in_tensorboard[name], strict=True)
        assert all(x == y and is_same(v, w) for (x, v), (y, w) in pairs), name
    tables = rows.tables(COMPLETIONS)
    shown = charts.tables(COMPLETIONS)
    assert [step for step, _ in tables] == [step for step, _ in shown] == charts.steps()
    for (_, one), (_, other) in zip(tables, shown, strict=True):
        assert other == [["" if cell is None else str(cell).strip() for cell in row] for row in one]
        assert len(one) == 1 + 2 * 8, "two groups of eight answers"
        assert all("plus" in row[2] and row[3] for row in one[1:])
        assert {row[4] for row in one[1:]} <= {0.0, 1.0}
