"""Train on 100 GSM8K questions through replay, proxy, hooks and server, and run a frozen control.

    python -m benchmarks.gsm8k_format [--seeds 2] [--write]

The demo model of 0.6 million parameters cannot solve the questions. It is rewarded for a format
that it sometimes uses, `It is N.` (tests/e2e/hooks_format), and learns to use it. Two of the 100
questions are longer than its context of 512 tokens. The requests with these two questions are
refused and counted, and the run continues.
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
"""Two rows of GSM8K's training set that are longer than the demo model's context."""
EPOCHS = 3
GROUPS_PER_STEP = 8
NUM_SIBLINGS = 8
REPLAY_TIMEOUT_S = 240.0
LAST_STEP_TIMEOUT_S = 60.0
TITLE = "gsm8k_format"


@dataclass(frozen=True, slots=True)
class Gsm8kRun(learning_runs.LearningRun):
    """One training run on GSM8K, or its frozen control."""

    WINDOW = 6  # 384 samples

    groups: dict[tuple[str, str | None], int]
    """Number of groups by state and reason."""
    replay_output: str

    def own_cells(self) -> dict[str, str]:
        states = sorted(self.groups.items())
        return {
            "steps": str(len(self.policy_mean)),
            "groups by state": ", ".join(f"{count} {state}" for (state, _), count in states),
        }


def run(folder: Path, seed: int, control: str) -> Gsm8kRun:
    """Start server, proxy and replay as a user would, and stop all of them at the end."""
    started_s = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    dataset = write_rows(folder / "gsm8k-100.jsonl")
    config = write_config(folder / "fakevllm.toml", seed, control)
    with Processes(folder) as started:
        server = started.server("--backend", "embedded", "--model", "demo", "--seed", str(seed))
        proxy = started.proxy(server, "--config", str(config))
        replay_result = replay(proxy, dataset, folder)
        # The replay exits with 1, because some rows do not fit into the context.
        assert replay_result.returncode == 1, replay_result.stdout + replay_result.stderr
        wait_until(
            lambda: _num_waiting(proxy) < GROUPS_PER_STEP, LAST_STEP_TIMEOUT_S, "the last step"
        )
        return Gsm8kRun(
            seed,
            control,
            _policy_mean(proxy),
            time.monotonic() - started_s,
            _groups(proxy),
            replay_result.stdout,
        )


def write_rows(file: Path) -> Path:
    """Write the 98 first rows of GSM8K and the two that are too long, and return the file."""
    lines = DATA.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:NUM_FITTING], *(lines[row] for row in TOO_LONG)]))
    return file


def write_config(file: Path, seed: int, control: str) -> Path:
    """Write a configuration with the demo's settings, which suit a model of this size."""
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
    """Run `fakevllm replay` over the dataset, and return its exit code and output."""
    command = [sys.executable, "-m", "fakevllm", "replay", "--dataset", str(dataset)]
    command += ["--url", f"{proxy.url}/v1", "--epochs", str(EPOCHS), "--max-tokens", "32"]
    command += ["--concurrency", "8", "--state", str(folder / "replay.jsonl")]
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"COLUMNS": "300"},  # one line for each failure
        capture_output=True,
        text=True,
        timeout=REPLAY_TIMEOUT_S,
    )


def _rows(proxy: Process, sql: str) -> list[tuple[Any, ...]]:
    with closing(connect(proxy.folder / "ledger.sqlite")) as ledger:
        return ledger.execute(sql).fetchall()


def _num_waiting(proxy: Process) -> int:
    """Return the number of groups that may still be trained."""
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
    counts = _rows(proxy, "select state, reason, count(*) from groups group by 1, 2")
    return {(state, reason): count for state, reason, count in counts}


def main() -> None:
    args = learning_runs.create_parser(__doc__).parse_args()
    run_conditions = conditions()
    with tempfile.TemporaryDirectory() as folder:
        runs = learning_runs.run_with_controls(run, Path(folder), args.seeds)
    learning_runs.print_runs(runs)
    if args.write:
        legend = (
            f"Start and end are means over {Gsm8kRun.WINDOW} steps of {GROUPS_PER_STEP} groups of "
            f"{NUM_SIBLINGS} siblings. The six failed groups are the two questions that are too "
            "long, in each of three epochs."
        )
        learning_runs.write_section(TITLE, run_conditions, runs, legend)


if __name__ == "__main__":
    main()
