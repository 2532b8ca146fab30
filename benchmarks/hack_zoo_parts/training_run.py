"""Train the base model with one hook through server and proxy, as an app would, and write the
record of the run.

    python -m benchmarks.hack_zoo_parts.training_run --hook praise --seed 0 --model FOLDER
        --folder FOLDER --json FILE [--steps 80]

The guard of the proxy has its default settings. Before the first step, and after some others, the
driver waits until no step is due, and measures the model on held-out rows with `fakevllm eval`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import re
import shutil
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu_learn_parts.arm_run import Progress, train
from benchmarks.hack_zoo_parts.hook_table import HOOKS, rows_of
from benchmarks.hack_zoo_parts.run_record import JUDGE, RunRecord, record_of
from benchmarks.run_log_reader import read_log_entries
from fakevllm.admission.dataset import read_tasks
from fakevllm.evaluation.command import EvalSettings, run_eval
from fakevllm_adapters.protocol.swarm import EngineStatus
from tests.e2e.processes import Process, Processes, wait_until

HOOK_FILE = Path(__file__).parent / "hook.py"
NUM_STEPS = 80
EVALUATE_AFTER = (0, 40, 60, 80)
"""Steps after which the model is measured on held-out rows."""
NUM_SIBLINGS = 6
GROUPS_PER_STEP = 6
LR = 2.5e-4
"""Learning rate of the demo."""
HELD_OUT_SAMPLES = 2
CONCURRENCY = 6
MAX_TOKENS = 64
TIMEOUT_S = 540.0
"""Seconds for the whole training of a run."""
QUIET_TIMEOUT_S = 60.0
QUIET_POLLS = 3
"""Number of successive looks that must show no running step."""
ALARM = re.compile(r"step (\d+), (\w+: .*) \(action: warn\)$", re.MULTILINE)
"""An alarm in the log of the proxy."""


def run(hook: str, seed: int, model: Path, folder: Path, num_steps: int = NUM_STEPS) -> RunRecord:
    """Train in a new folder, and return the record of the run."""
    folder.mkdir(parents=True)
    training, held_out = folder / "training.jsonl", folder / "held_out.jsonl"
    for file, is_held_out in ((training, False), (held_out, True)):
        rows = rows_of(hook, seed, held_out=is_held_out)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = folder / "fakevllm.toml"
    config.write_text(_settings(seed, num_steps))
    deadline = time.monotonic() + TIMEOUT_S
    with Processes(folder, shows_logs=False) as started:
        server = started.server(
            *("--backend", "embedded", "--model", str(model), "--seed", str(seed)),
            *("--track", "none"),
        )
        proxy = started.proxy(server, "--config", str(config))
        tasks = read_tasks(training, "question")
        pauses = [step for step in EVALUATE_AFTER if step < num_steps]
        for step in (*pauses, num_steps):
            if step:
                progress = Progress(proxy.url, step, deadline)
                training = train(
                    proxy,
                    tasks,
                    seed + step,
                    progress,
                    max_tokens=MAX_TOKENS,
                    concurrency=CONCURRENCY,
                )
                asyncio.run(training)
                assert progress.is_complete, f"{hook}: step {step} took too long; see {folder}"
            _wait_until_quiet(proxy)
            _evaluate(proxy, held_out)
        wait_until(lambda: _guard_has_read(proxy, server), QUIET_TIMEOUT_S, "the guard")
    record = record_of(hook, seed, server.folder, proxy.folder / "ledger.sqlite")
    alarms = [f"{step} {text}" for step, text in ALARM.findall(proxy.log)]
    return replace(record, live_alarms=[alarm for alarm in alarms if " held_out_gap:" not in alarm])


def _settings(seed: int, num_steps: int) -> str:
    """Return the proxy's configuration, with the training job."""
    job: dict[str, Any] = {
        "num_repeat": NUM_SIBLINGS,
        "batch_size": GROUPS_PER_STEP,
        "lr": LR,
        "ppo_epochs": 2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "seed": seed,
        "total_training_steps": num_steps,
    }
    lines = ["[hooks]", f"path = {json.dumps(str(HOOK_FILE))}", ""]
    lines += ["[guard]", f'second_judge_annotation = "{JUDGE}"', "", "[job]"]
    return "\n".join([*lines, *(f"{key} = {json.dumps(value)}" for key, value in job.items()), ""])


def _wait_until_quiet(proxy: Process) -> None:
    """Wait until no training step runs or is due, so that the weights do not change."""
    progress = Progress(proxy.url, 0, 0.0)
    num_quiet = 0

    def is_quiet() -> bool:
        nonlocal num_quiet
        asyncio.run(progress.poll())
        status = progress.status
        assert status is not None, "a poll without an answer raises an error"
        is_due = status.backlog >= 1 and status.closed is None
        rests = status.engine_status is EngineStatus.ROLLING and not is_due
        num_quiet = num_quiet + 1 if rests else 0
        return num_quiet >= QUIET_POLLS

    wait_until(is_quiet, QUIET_TIMEOUT_S, "the end of a training step")


def _evaluate(proxy: Process, held_out: Path) -> None:
    """Measure the served weights on the held-out rows. The rewards are in the ledger afterwards."""
    settings = EvalSettings(
        *(held_out, "question", f"{proxy.url}/v1"),
        num_samples=HELD_OUT_SAMPLES,
        concurrency=CONCURRENCY,
        max_tokens=MAX_TOKENS,
    )
    run_eval(settings, Console(file=io.StringIO()))


def _guard_has_read(proxy: Process, server: Process) -> bool:
    """Return True if the proxy's guard has read the whole run log. It stores how far it has read
    in the ledger, after it has raised the alarms."""
    with closing(sqlite3.connect(proxy.folder / "ledger.sqlite")) as ledger:
        row = ledger.execute("SELECT value FROM meta WHERE key = 'guard'").fetchone()
    last = read_log_entries(server.folder)[-1]
    return row is not None and json.loads(row[0])["seq"] >= last["seq"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hook", choices=list(HOOKS), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, required=True, help="folder of the base model")
    parser.add_argument("--folder", type=Path, required=True, help="new folder for the run")
    parser.add_argument("--json", type=Path, required=True, help="file for the record")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="number of training steps")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)  # of an attempt that was interrupted
    folder = options.folder.resolve()
    record = run(options.hook, options.seed, options.model.resolve(), folder, options.steps)
    record.write(options.json)
    last = record.steps[-1]
    print(
        f"{record.name}: onset {record.onset}, at the end {last.right:.2f} right and "
        f"{last.cheats:.2f} cheats, alarms {[one.detector for one in record.alarms()]}"
    )


if __name__ == "__main__":
    main()
