"""Compare what users' edits teach with what their thumbs teach.

    python -m benchmarks.edits_or_thumbs [--seeds 3] [--first-seed 0] [--edits 100]
        [--lr 2.5e-4] [--write]

For each seed, two runs answer questions: sums from the demo, without the held-out sums. A made-up
user gives feedback on each answer, until 100 answers were wrong. In both runs, a right answer gets
a thumbs up, and a wrong one a thumbs down. In one of the runs, the user also sends the right text
instead of each wrong answer. The answers of the two runs differ, because each is sampled by the
weights of that moment. The hook gives all siblings the same reward, so nothing but feedback is
trained. The score is the share of right answers to held-out sums.

The exit code is 1 if the edits do not raise the score more than the thumbs with one of the seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.results import conditions, markdown_table, print_table, replace_section
from benchmarks.run_log_reader import read_step_entries
from fakevllm.demo.accuracy_probe import MAX_TOKENS, probe
from fakevllm.demo.tasks import all_tasks, training_tasks
from fakevllm_adapters.protocol.swarm import Task
from tests.e2e.processes import Process, Processes

TITLE = "edits_or_thumbs"
SEEDS = 3
LR = 2.5e-4
"""The demo's learning rate."""
NUM_EDITS = 100
NUM_SAMPLES = 1000
"""Number of answers from which a score is computed."""
BATCH_SIZE = 10
LIMIT_S = 300.0
"""Seconds to wait until the feedback is trained."""
CONFIG = """
[job]
num_repeat = 2
batch_size = {batch_size}
lr = {lr}
seed = {seed}
filter_groups = "collect"
max_staleness = 1000
demonstration_loss = "sft"

[feedback]
edits = "{edits}"
"""
HOOK = "def on_compute_relative_reward(siblings, answers):\n    return [0.0 for _ in answers]\n"
LAST_NUMBER = re.compile(r"(\d+)\.?$")
_OPEN = """
    SELECT COUNT(*) FROM feedback
    WHERE state IN ('received', 'waiting') OR edit_state = 'waiting'
"""
_TRAINED = """
    SELECT COUNT(CASE WHEN state IN ('joined', 'trained') THEN 1 END),
           COUNT(CASE WHEN edit_state = 'trained' THEN 1 END) FROM feedback
"""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of one run."""

    before: float
    after: float
    """Shares of right answers to held-out sums, before and after training."""
    thumbs: int
    edits: int
    """Numbers of thumbs and of edits that were trained. A thumb that arrives early is trained with
    its group: it is added to the reward of the answer that the user got."""
    steps: int

    @property
    def gain(self) -> float:
        return self.after - self.before


HEADER = [
    *("seed", "feedback", "trained thumbs", "trained edits", "steps"),
    *("score before", "score after", "gain"),
]


def held_out_tasks() -> list[Task]:
    """Return the sums about which no user asks."""
    asked = {task.task_id for task in training_tasks()}
    return [task for task in all_tasks() if task.task_id not in asked]


def is_right(task: Task, text: str) -> bool:
    """Return True if an answer ends with the right sum.

    >>> is_right(training_tasks()[0], "It is 0."), is_right(training_tasks()[0], "It is 10.")
    (True, False)
    """
    number = LAST_NUMBER.search(text.strip())
    return number is not None and int(number[1]) == task.metadata["sum"]


def measure(folder: Path, seed: int, num: int, lr: float, *, has_edits: bool) -> RunFigures:
    """Make one run, and return its figures."""
    folder.mkdir(parents=True)
    config, hook = folder / "fakevllm.toml", folder / "hook.py"
    edits = "sft" if has_edits else "keep"
    config.write_text(CONFIG.format(batch_size=BATCH_SIZE, lr=lr, seed=seed, edits=edits))
    hook.write_text(HOOK)
    with Processes(folder, shows_logs=False) as started:
        server = started.server("--backend", "embedded", "--model", "demo")
        proxy = started.proxy(server, "--config", str(config), "--hooks", str(hook))
        before = score(server)
        give_feedback(proxy, random.Random(seed), num, has_edits=has_edits)
        thumbs, trained_edits = wait_trained(proxy.folder / "ledger.sqlite")
        after = score(server)
        steps = len(read_step_entries(server.folder))
    return RunFigures(before, after, thumbs, trained_edits, steps)


def score(server: Process) -> float:
    """Return the share of right answers to held-out sums. The server trains none of them."""
    found = asyncio.run(
        probe(f"{server.url}/v1", "demo", held_out_tasks(), lambda: None, NUM_SAMPLES)
    )
    return found.success


def give_feedback(proxy: Process, rng: random.Random, num_edits: int, *, has_edits: bool) -> None:
    """Ask questions, and send feedback on each answer, until `num_edits` answers were wrong."""
    tasks = training_tasks()
    num_wrong = 0
    with httpx.Client(base_url=proxy.url, timeout=60.0) as http:
        while num_wrong < num_edits:
            task = rng.choice(tasks)
            messages = [{"role": "user", "content": task.main_query}]
            body = {"model": "demo", "messages": messages, "max_tokens": MAX_TOKENS}
            reply = http.post("/v1/chat/completions", json=body).raise_for_status().json()
            is_wrong = not is_right(task, reply["choices"][0]["message"]["content"] or "")
            feedback = {"id": reply["id"], "thumbs": "down" if is_wrong else "up"}
            if has_edits and is_wrong:
                feedback["edited"] = f"It is {task.metadata['sum']}."
            http.post("/v1/feedback", json=feedback).raise_for_status()
            num_wrong += is_wrong


def wait_trained(ledger: Path) -> tuple[int, int]:
    """Wait until no feedback waits in the proxy, and until training is over. Return the numbers of
    trained thumbs and of trained edits. Fewer than a batch of them may be left at the server."""
    deadline = time.monotonic() + LIMIT_S
    trained, unchanged = (-1, -1), 0
    while time.monotonic() < deadline:
        with closing(sqlite3.connect(ledger)) as db:
            num_open = db.execute(_OPEN).fetchone()[0]
            thumbs, edits = db.execute(_TRAINED).fetchone()
        unchanged = unchanged + 1 if not num_open and (thumbs, edits) == trained else 0
        trained = thumbs, edits
        if unchanged == 10:
            return trained
        time.sleep(1.0)
    sys.exit(f"feedback was not trained within {LIMIT_S:.0f} s: see {ledger}")


def cells(seed: int, name: str, run: RunFigures) -> list[str]:
    return [
        *(str(seed), name, str(run.thumbs), str(run.edits), str(run.steps)),
        *(f"{run.before:.3f}", f"{run.after:.3f}", f"{run.gain:+.3f}"),
    ]


def failures(seed: int, edits: RunFigures, thumbs: RunFigures) -> Sequence[str]:
    if edits.gain > thumbs.gain:
        return []
    return [f"seed {seed}: edits gained {edits.gain:+.3f}, and thumbs {thumbs.gain:+.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them")
    parser.add_argument("--edits", type=int, default=NUM_EDITS, help="wrong answers of a run")
    parser.add_argument("--lr", type=float, default=LR, help="learning rate")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    run_conditions = conditions()
    rows: list[list[str]] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            folder = Path(temporary) / f"seed-{seed}"
            edits = measure(folder / "edits", seed, args.edits, args.lr, has_edits=True)
            thumbs = measure(folder / "thumbs", seed, args.edits, args.lr, has_edits=False)
            rows += [cells(seed, "thumbs and edits", edits), cells(seed, "thumbs", thumbs)]
            failed += failures(seed, edits, thumbs)
    caption = (
        "A made-up user gives feedback on answers to the demo's sums, until "
        f"{args.edits} were wrong: a thumb on each, and in one of the runs also the right text "
        'instead of each wrong answer (`[feedback] edits = "sft"`). Nothing else is trained, at a '
        f"learning rate of {args.lr:g}. The score is the share of right answers among "
        f"{NUM_SAMPLES} to sums about which the user never asked."
    )
    print_table(HEADER, rows, caption)
    if args.write:
        replace_section(TITLE, f"{run_conditions}\n{markdown_table(HEADER, rows)}\n{caption}")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
