"""A test that continues a run of an earlier version.

`released/run-0.1.0.tar.gz` was written by version 0.1.0: `fakevllm-server start --backend fake`
and `fakevllm serve` with the settings below replayed 30 questions. Its ledger has 28 trained groups
and 2 groups that wait in the pool. Its journal has 7 steps and 3 checkpoints.
"""

from __future__ import annotations

import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import httpx

from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Processes, wait_until

ARCHIVE = Path(__file__).parent / "released" / "run-0.1.0.tar.gz"
SETTINGS = """
[job]
num_repeat = 4
batch_size = 4
lr = 0.5
save_freq = 2
"""
STEPS_BEFORE, TRAINED_BEFORE, POOLED_BEFORE = 7, 28, 2


def group_ids(ledger: Path, state: str) -> list[str]:
    with closing(sqlite3.connect(ledger)) as db:
        rows = db.execute("SELECT group_id FROM groups WHERE state = ?", (state,)).fetchall()
    return [group_id for (group_id,) in rows]


def states_of(ledger: Path, ids: list[str]) -> list[str]:
    with closing(sqlite3.connect(ledger)) as db:
        states = dict(db.execute("SELECT group_id, state FROM groups").fetchall())
    return [states[group_id] for group_id in ids]


def test_a_run_of_an_earlier_version_opens_and_continues(tmp_path: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    run, ledger = tmp_path / "run", tmp_path / "run" / "ledger.sqlite"
    trained, waiting = group_ids(ledger, "trained"), group_ids(ledger, "pooled")
    assert (len(trained), len(waiting)) == (TRAINED_BEFORE, POOLED_BEFORE)
    (run / "fakevllm.toml").write_text(SETTINGS)
    hooks = write_hooks(tmp_path / "hooks", PREFER_YES)

    with Processes(tmp_path) as started:
        server = started.server("--backend", "fake", folder="run")
        status = httpx.get(f"{server.url}/get_engine_status").json()
        assert status["global_step"] >= STEPS_BEFORE, status
        proxy = started.proxy(server, "--hooks", str(hooks), folder="run")
        for number in range(6):
            question = [{"role": "user", "content": f"Say yes or no, once more {number}"}]
            reply = httpx.post(
                f"{proxy.url}/v1/chat/completions",
                json={"model": "fake", "messages": question},
                timeout=60,
            )
            assert reply.status_code == 200, reply.text

        wait_until(
            lambda: "pooled" not in states_of(ledger, waiting),
            60,
            "a step that trains or drops the two groups of the earlier version",
        )
    assert states_of(ledger, trained) == ["trained"] * TRAINED_BEFORE
    assert set(states_of(ledger, waiting)) <= {"trained", "dropped"}
    with closing(sqlite3.connect(ledger)) as db:
        steps = db.execute("SELECT DISTINCT trained_step FROM groups ORDER BY 1").fetchall()
    assert [step for (step,) in steps if step][:8] == [1, 2, 3, 4, 5, 6, 7, 8]
