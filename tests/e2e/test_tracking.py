"""A run of `fakevllm up` whose curves are in TensorBoard's files and in wandb's, as `[tracking]`
says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.processes import Processes
from tests.e2e.test_commands import assert_mistake, run
from tests.e2e.test_up import UP, started_up, train_steps, wait_for_line, write_config
from tests.swarm_server.curves.readings import Charts
from tests.swarm_server.curves.wandb_rows import WandbRows, is_same, needs_wandb


@needs_wandb
@pytest.mark.parametrize("trackers", ['"tensorboard", "wandb"', '"wandb"', ""])
def test_the_trackers_in_the_file_get_the_same_curves(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trackers: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    up, _ = started_up(processes, f'backend = "fake"\n[tracking]\nto = [{trackers}]\n')
    wait_for_line(up, "ready: apps use")
    run_dir = up.folder / "run"
    train_steps(up.url, run_dir, 3)
    up.stop()
    has = {name: (run_dir / name).exists() for name in ("tensorboard", "wandb")}
    assert has == {name: name in trackers for name in has}, up.log
    if "wandb" not in trackers:
        return
    rows = WandbRows(run_dir)
    steps = [step for step, _ in rows.points()["critic/score/mean"]]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 3
    if "tensorboard" not in trackers:
        return
    in_wandb, in_tensorboard = rows.points(), Charts(run_dir).all_points()
    assert in_wandb.keys() == in_tensorboard.keys()
    for name in in_wandb:
        pairs = zip(in_wandb[name], in_tensorboard[name], strict=True)
        assert all(x == y and is_same(v, w) for (x, v), (y, w) in pairs), name


def test_an_unknown_tracker_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    write_config(tmp_path, 'backend = "fake"\n[tracking]\nto = ["tensorbord"]\n')
    done = run(tmp_path, *UP)
    assert_mistake(done, "Unknown tracker 'tensorbord'")
    assert "take tensorboard, wandb or none" in done.stderr
