"""A run of `fakevllm up` whose curves are in TensorBoard's files and in wandb's, as `[tracking]`
says."""

from __future__ import annotations

import html
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from fakevllm_server.curves.trackers import folders_with_tables
from tests.e2e.processes import Process, Processes, wait_until
from tests.e2e.test_commands import assert_mistake, run
from tests.e2e.test_up import HI, UP, started_up, train_steps, wait_for_line, write_config
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
    assert not any(name in texts_below(run_dir) for name in (b"completions", b"samples_missing"))
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


SECRET, UNSTORED, KEPT = "ann@example.org", "Unstored-0815", "Kept-4711"


def texts_below(run_dir: Path) -> bytes:
    """Return all bytes of the trackers' files, as they are and without the escapes of HTML."""
    files = [*(run_dir / "tensorboard").rglob("*"), *(run_dir / "wandb").rglob("*")]
    raw = b"".join(file.read_bytes() for file in files if file.is_file())
    return raw + html.unescape(raw.decode(errors="replace")).encode()


def ask(url: str, text: str, **headers: str) -> None:
    body = HI | {"messages": [{"role": "user", "content": text}]}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    reply.raise_for_status()


@needs_wandb
def test_samples_are_written_without_redacted_or_unstored_texts_and_forget_names_their_folders(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    tables = '[tracking]\nto = ["tensorboard", "wandb"]\nsamples = 1\nsamples_every = 1\n'
    privacy = '[privacy]\nredact = ["email"]\n'
    up, ports = started_up(processes, f'backend = "fake"\n{tables}{privacy}')
    wait_for_line(up, "ready: apps use")
    run_dir = up.folder / "run"
    ask(up.url, f"I am {SECRET}")
    ask(up.url, UNSTORED, **{"X-Fakevllm-Store": "none"})
    ask(up.url, KEPT)
    train_steps(up.url, run_dir, 3)
    wait_until(lambda: len(folders_with_tables(run_dir)) == 2, 60, lambda: up.log)
    with closing(sqlite3.connect(f"file:{run_dir}/ledger.sqlite?mode=ro", uri=True)) as ledger:
        query = "SELECT group_id FROM groups WHERE state = 'trained' AND question LIKE ?"
        wait_until(
            lambda: bool(ledger.execute(query, (f"%{KEPT}%",)).fetchall()), 60, "a trained group"
        )
        ((trained,),) = ledger.execute(query, (f"%{KEPT}%",)).fetchall()
    forget = run(up.folder, "-m", "fakevllm", "forget", "--id", trained)
    assert forget.returncode == 1 and "1 group was forgotten" in forget.stdout, forget.stderr
    for name in ("tensorboard", "wandb"):
        assert str(run_dir.resolve() / name) in forget.stderr
    assert "Tables of samples in" in up.log
    up.stop()
    rows, charts = WandbRows(run_dir), Charts(run_dir)
    in_wandb, in_tensorboard = rows.tables("completions"), charts.tables("completions")
    assert len(in_wandb) == len(in_tensorboard) >= 3
    for (_, one), (_, other) in zip(in_wandb, in_tensorboard, strict=True):
        assert other == [["" if cell is None else str(cell).strip() for cell in row] for row in one]
        assert len(one) == 1 + 4 and {row[3] for row in one[1:]} <= {"yes.<|end|>", "no.<|end|>"}
    assert KEPT.encode() in texts_below(run_dir)
    assert SECRET.encode() not in texts_below(run_dir)
    assert UNSTORED.encode() not in texts_below(run_dir)
    for name in ("tensorboard", "wandb"):
        shutil.rmtree(run_dir / name)
    again = processes.adopt(Process("again", UP, ports["proxy"], up.folder))
    wait_for_line(again, "ready: apps use")
    wait_until(lambda: len(folders_with_tables(run_dir)) == 2, 60, lambda: again.log)
    again.stop()
    assert Charts(run_dir).steps() == charts.steps()
    assert KEPT.encode() not in texts_below(run_dir)


def test_an_unknown_tracker_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    write_config(tmp_path, 'backend = "fake"\n[tracking]\nto = ["tensorbord"]\n')
    done = run(tmp_path, *UP)
    assert_mistake(done, "Unknown tracker 'tensorbord'")
    assert "take tensorboard, wandb or none" in done.stderr
