"""Tests that two runs in lockstep are bitwise equal, with real processes and the torch engine.

The two runs are in parallel, so that their timing differs.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.run_log_reader import read_step_entries
from tests.e2e.hook_files import write_hooks
from tests.e2e.processes import Process, Processes

pytestmark = pytest.mark.timeout(300)  # two engines start at once

Json = dict[str, Any]

TIME_METRICS = {"seconds", "step_seconds", "trainer_wait_share", "forest_speedup"}
"""Metrics that measure time."""
REPLAY = [sys.executable, "-m", "fakevllm", "replay", "--dataset", "rows.jsonl"]
NAMES = ("one", "other")

PREFER_SHORT = """
def on_compute_relative_reward(valid_results, all_answers):
    return [-float(len(answer["content"] or "")) for answer in all_answers]
"""
JOB = """
[job]
num_repeat = 4
batch_size = 3
lr = 1e-3
total_training_steps = 3
"""
ROWS = "".join(f'{{"question": "What is {a} plus 3?"}}\n' for a in range(5))
TWO_TURNS = """
import json, os, sys, urllib.request

URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
history = []
for text in (sys.argv[1], "What is 1 plus 4?"):
    history.append({"role": "user", "content": text})
    body = json.dumps({"model": "demo", "messages": history, "max_tokens": 24}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{URL}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        history.append(json.load(answer)["choices"][0]["message"])
"""
"""An app with two turns.

A step has three groups and a row has two, so the weights change in the middle of a row."""


def measured(run_dir: Path) -> list[Json]:
    """Return the entries of all steps without the metrics that measure time."""
    return [
        {"step": entry["step"], "version": entry["version"]}
        | {name: value for name, value in entry["metrics"].items() if name not in TIME_METRICS}
        for entry in read_step_entries(run_dir)
    ]


def digests(run_dir: Path) -> dict[str, str]:
    """Return the digests of all checkpoint files: weights, optimizer moments, sampler state."""
    files = sorted((run_dir / "checkpoints").rglob("*.*"))
    return {
        str(file.relative_to(run_dir)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


def sampled(run_dir: Path, condition: str = "1") -> list[Any]:
    """Return texts, rewards and `served` of the siblings, in the order of the groups."""
    query = (
        'select question, "index", text, reward, served from siblings join groups using (group_id)'
        f' where {condition} order by received_at, "index"'
    )
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as ledger:
        return ledger.execute(query).fetchall()


def start(started: Processes) -> Process:
    """Start a server and a proxy in lockstep, without waiting for the engine."""
    hooks = write_hooks(started.folder / "hooks", PREFER_SHORT)
    config = started.folder / "job.toml"
    config.write_text(JOB)
    (started.folder / "rows.jsonl").write_text(ROWS)
    (started.folder / "app.py").write_text(TWO_TURNS)
    server = started.server("--model", "demo")
    flags = ["--config", str(config), "--hooks", str(hooks), "--lockstep"]
    return started.proxy(server, *flags, wait=False)


def run_in_parallel(commands: Sequence[list[str]], folders: Sequence[Path]) -> None:
    """Run the commands in parallel, and check that all succeed."""
    pairs = zip(commands, folders, strict=True)
    both = [
        subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for command, folder in pairs
    ]
    try:
        assert [one.wait(timeout=250) for one in both] == [0, 0]
    finally:
        for one in both:
            one.kill()
            one.wait()


def test_two_replays_through_an_app_train_bitwise_equal_weights(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in NAMES]
    with ExitStack() as stack:
        both = [stack.enter_context(Processes(folder)) for folder in folders]
        proxies = [start(one) for one in both]
        app = ["--app", f"{sys.executable} app.py {{question}}"]
        run_in_parallel(
            [
                [*REPLAY, "--lockstep", *app, "--url", proxy.wait_until_healthy().url]
                for proxy in proxies
            ],
            folders,
        )
    one, other = (
        (measured(folder / "server"), digests(folder / "server"), sampled(folder / "proxy"))
        for folder in folders
    )
    assert one == other
    steps, saved, texts = one
    assert [step["groups_with_signal"] > 0 for step in steps] == [True] * 3
    assert [step["equal_version"] for step in steps] == [1.0] * 3
    assert any("weights" in name for name in saved)
    assert len(texts) == 5 * 2 * 4 and len({text for _, _, text, _, _ in texts}) > 4


@pytest.mark.live
def test_two_demos_have_bitwise_equal_curves(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in NAMES]
    command = [sys.executable, "-m", "fakevllm", "demo", "--lockstep", "--steps", "10"]
    run_in_parallel(
        [
            [*command, "--seed", "0", "--run-dir", str(folder), "--json", f"{folder}.json"]
            for folder in folders
        ],
        [tmp_path, tmp_path],
    )
    curves = [json.loads(Path(f"{folder}.json").read_text()) for folder in folders]
    one, other = (
        (measured(folder), digests(folder), sampled(folder, "groups.state = 'trained'"))
        for folder in folders
    )
    assert one == other
    for known in ("before", "policy_mean", "returned_best", "after"):
        assert curves[0][known] == curves[1][known]
    assert [step["equal_version"] for step in one[0]] == [1.0] * 10
    assert len(curves[0]["policy_mean"]) == 10
    print(f"policy mean {curves[0]['policy_mean']}, after {curves[0]['after']}")
