"""Real data: 100 GSM8K questions through proxy, hooks, ledger and training, beside a frozen
control.

    python -m benchmarks.gsm8k_format [--seeds 2] [--write]

The demo model of 0.6 million parameters will not solve them. It is rewarded for a format that it
sometimes uses, `It is N.` (tests/e2e/hooks_format), and takes to it. Two of the 100 questions are
longer than its 512 tokens: they are refused, counted, and the run goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import connect
from typing import Any

from benchmarks import learning_runs
from benchmarks.results import ROOT, conditions
from tests.e2e.processes import Process, Processes, wait_until

DATA = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
HOOKS = ROOT / "tests" / "e2e" / "hooks_format"
NUM_FITTING = 98
TOO_LONG = (2345, 3331)
"""The two rows of GSM8K's training set that the demo model's context does not hold."""
EPOCHS = 3
GROUPS_PER_STEP = 8
NUM_SIBLINGS = 8
REPLAY_TIMEOUT_S = 240.0
LAST_STEP_TIMEOUT_S = 60.0
TITLE = "gsm8k_format"


@dataclass(frozen=True, slots=True)
class Run(learning_runs.Run):
    WINDOW = 6  # 384 samples

    groups: dict[tuple[str, str | None], int]
    """By state and reason."""
    replay_output: str

    def own_cells(self) -> dict[str, str]:
        states = sorted(self.groups.items())
        return {
            "steps": str(len(self.policy_mean)),
            "groups by state": ", ".join(f"{count} {state}" for (state, _), count in states),
        }


def run(folder: Path, seed: int, control: str) -> Run:
    """Server, proxy and replay as a user would start them; all of it stopped in the end."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    dataset = write_rows(folder / "gsm8k-100.jsonl")
    config = write_config(folder / "fakevllm.toml", seed, control)
    with Processes(folder) as started:
        server = started.server("--backend", "embedded", "--model", "demo", "--seed", str(seed))
        proxy = started.proxy(server, "--config", str(config))
        replayed = replay(proxy, dataset, folder)
        # some rows do not fit, which is told by the exit code
        assert replayed.returncode == 1, replayed.stdout + replayed.stderr
        wait_until(lambda: _num_waiting(proxy) < GROUPS_PER_STEP, LAST_STEP_TIMEOUT_S, "the end")
        return Run(
            seed,
            control,
            _policy_mean(proxy),
            time.monotonic() - began,
            _groups(proxy),
            replayed.stdout,
        )


def write_rows(file: Path) -> Path:
    lines = DATA.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:NUM_FITTING], *(lines[row] for row in TOO_LONG)]))
    return file


def write_config(file: Path, seed: int, control: str) -> Path:
    """The demo's settings: those under which a model of this size learns."""
    job: dict[str, Any] = {
        "num_repeat": NUM_SIBLINGS,
        "batch_size": GROUPS_PER_STEP,
        "lr": 4e-4,
        "ppo_epochs": 2,
        "seed": seed,
        "control": control,
    }
    lines = ["[hooks]", f"path = {json.dumps(str(HOOKS))}", "", "[job]"]
    file.write_text("\n".join([*lines, *(f"{key} = {json.dumps(job[key])}" for key in job), ""]))
    return file


def replay(proxy: Process, dataset: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fakevllm", "replay", "--dataset", str(dataset)]
    command += ["--url", f"{proxy.url}/v1", "--epochs", str(EPOCHS), "--max-tokens", "32"]
    command += ["--concurrency", "8", "--state", str(folder / "replay.jsonl")]
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"COLUMNS": "300"},  # failures are shown on one line each
        capture_output=True,
        text=True,
        timeout=REPLAY_TIMEOUT_S,
    )


def _rows(proxy: Process, sql: str) -> list[tuple[Any, ...]]:
    with closing(connect(proxy.folder / "ledger.sqlite")) as ledger:
        return ledger.execute(sql).fetchall()


def _num_waiting(proxy: Process) -> int:
    """Groups that may still be trained."""
    sql = "select count(*) from groups where state in ('scored', 'pooled')"
    return _rows(proxy, sql)[0][0]


def _policy_mean(proxy: Process) -> list[float]:
    means = _rows(
        proxy,
        "select g.trained_step, avg(s.reward) from groups g join siblings s using (group_id) "
        "where g.trained_step is not null group by 1 order by 1",
    )
    return [mean for _, mean in means]


def _groups(proxy: Process) -> dict[tuple[str, str | None], int]:
    counted = _rows(proxy, "select state, reason, count(*) from groups group by 1, 2")
    return {(state, reason): count for state, reason, count in counted}


def main() -> None:
    args = learning_runs.parser_of(__doc__).parse_args()
    told = conditions()
    with tempfile.TemporaryDirectory() as folder:
        runs = learning_runs.with_controls(run, Path(folder), args.seeds)
    learning_runs.show(runs)
    if args.write:
        legend = f"Start and end are means over {Run.WINDOW} steps of {GROUPS_PER_STEP} groups of "
        legend += f"{NUM_SIBLINGS}. The six failed groups are the two questions that do not fit."
        learning_runs.write(TITLE, told, runs, legend)


if __name__ == "__main__":
    main()
