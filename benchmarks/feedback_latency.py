"""Measure the time from a user's feedback to the first answer of a version that trained on it.

    python -m benchmarks.feedback_latency [--steps 60] [--seeds 1] [--write]

An app sends questions while `fakevllm demo` runs, without and with `--gated`. A user rates each
answer of the app with a thumb. Feedback is trained by itself or as a part of its group. In both
cases, the ledger has the version of the weights that the training step made. The header
`x-fakevllm-version` says which version gave an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import re
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.demo_parts.concurrent_app import demo_proxy_url, register_until_ready
from benchmarks.results import conditions, markdown_table, print_table, replace_section
from fakevllm_adapters.protocol.swarm import Task

TITLE = "feedback_latency"
STEPS = 60
NUM_USERS = 2
MEAN_PAUSE_S = 0.3
MAX_TOKENS = 24
SUMS = ((1, 3), (6, 7), (4, 4), (7, 3))
"""The app's questions. The gated demo trains these questions too. There are only few questions,
because each question has an API key of its own, and feedback with a key is trained only when the
key has eight feedbacks."""
WRONG_THUMBS = 0.2
"""Share of thumbs that point the wrong way. Without wrong thumbs, all feedback would soon be equal,
and equal feedback is dropped."""
DEMO_TIMEOUT_S = 900.0
MIN_FEEDBACKS = 10
_SUM = re.compile(r"(\d+)\.?$")
_TRAINED = """
    SELECT f.received_at, COALESCE(f.trained_version, g.trained_version) AS version
    FROM feedback AS f JOIN groups AS g USING (group_id)
    WHERE version IS NOT NULL AND (f.state = 'trained' OR f.state = 'joined')
"""
"""SQL for all feedback that was trained. It was trained by itself, or as a part of the reward of
its group. The second case is feedback that arrived before the group was sent to the server."""
_ARMS = "SELECT group_id, arm FROM groups WHERE kind IS NOT 'eval'"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that the app received."""

    received_at: float
    """Unix time in seconds at which the app had the whole answer."""
    version: int
    """Version of the weights that gave the answer."""
    group_id: str


@dataclass(frozen=True, slots=True)
class Latencies:
    """The results of one run."""

    name: str
    arm: str | None
    """Arm whose answers count; None if all count."""
    latencies_s: list[float]
    """Seconds from each trained feedback to the first answer of a version that trained on it.
    Infinite if no such answer came before the end of the run."""

    def cells(self) -> list[str]:
        """Return the row of the table."""
        ordered = sorted(self.latencies_s)
        shown = [_shown(_at_share(ordered, share)) for share in (0.5, 0.9, 1.0)]
        counts = [str(len(ordered)), str(sum(map(math.isinf, ordered)))]
        return [self.name, self.arm or "all", *shown, *counts]


def _at_share(ordered: Sequence[float], share: float) -> float:
    """Return the quantile of the latencies at `share`: the smallest latency such that at least this
    share of the latencies is not larger."""
    return ordered[math.ceil(share * len(ordered)) - 1]


def _shown(seconds: float) -> str:
    return "not before the end" if math.isinf(seconds) else f"{seconds:.1f}"


HEADER = [
    "demo",
    "answers of the arm",
    "p50, s",
    "p90, s",
    "longest, s",
    "feedbacks",
    "without an answer before the end",
]


def latencies(
    name: str,
    feedbacks: Sequence[tuple[float, int]],
    answers: Sequence[Answer],
    arm: str | None = None,
) -> Latencies:
    """Return the time from each feedback to the first answer of a version that trained on it.
    `feedbacks` are pairs of Unix time and version. `answers` are in order of time.

    >>> answers = [Answer(1.0, 4, "a"), Answer(2.5, 5, "b")]
    >>> latencies("plain", [(0.5, 5), (2.0, 6)], answers)
    Latencies(name='plain', arm=None, latencies_s=[2.0, inf])
    """
    found: list[float] = []
    for sent_at, version in feedbacks:
        later = (
            one.received_at
            for one in answers
            if one.received_at > sent_at and one.version >= version
        )
        found.append(next(later, math.inf) - sent_at)
    return Latencies(name, arm, found)


async def rate_answers(run_dir: Path, seed: int, answers: list[Answer]) -> None:
    """Send questions to the demo's proxy and rate each answer, until cancelled."""
    url = await demo_proxy_url(run_dir)
    tasks = [_task(*pair) for pair in SUMS]
    model, keys = await register_until_ready(url, tasks)

    async def use(user: int) -> None:
        chance = random.Random(f"user {user} {seed}")
        async with httpx.AsyncClient(base_url=url, timeout=DEMO_TIMEOUT_S) as http:
            while True:
                task = chance.choice(tasks)
                http.headers["authorization"] = f"Bearer {keys[task.task_id]}"
                await _ask_and_rate(http, model, task, chance, answers)
                await asyncio.sleep(chance.expovariate(1 / MEAN_PAUSE_S))

    async with asyncio.TaskGroup() as users:
        for user in range(NUM_USERS):
            users.create_task(use(user))


async def _ask_and_rate(
    http: httpx.AsyncClient,
    model: str,
    task: Task,
    chance: random.Random,
    answers: list[Answer],
) -> None:
    question = {"role": "user", "content": task.main_query}
    body = {"model": model, "messages": [question], "max_tokens": MAX_TOKENS}
    response = (await http.post("/chat/completions", json=body)).raise_for_status()
    received_at = time.time()
    version = response.headers.get("x-fakevllm-version")
    if version is not None:  # it is missing if the weights changed during the answer
        answers.append(Answer(received_at, int(version), response.headers["x-fakevllm-group"]))
    answer = response.json()
    number = _SUM.search((answer["choices"][0]["message"]["content"] or "").strip())
    is_right = number is not None and int(number[1]) == task.metadata["sum"]
    is_up = is_right != (chance.random() < WRONG_THUMBS)
    feedback = {"id": answer["id"], "thumbs": "up" if is_up else "down"}
    (await http.post("/feedback", json=feedback)).raise_for_status()


def _task(a: int, b: int) -> Task:
    question = f"What is {a} plus {b}?"
    return Task(task_id=f"rated-{a}-{b}", main_query=question, metadata={"sum": a + b})


async def run(folder: Path, seed: int, steps: int, *, is_gated: bool) -> list[Latencies]:
    """Run the demo together with the app, and return the latencies. For a gated demo, also return
    the latencies of the released arm alone.

    Raises AssertionError if the demo fails or if too few feedbacks were trained.
    """
    folder.mkdir(parents=True)
    run_dir, log_file = folder / "run", folder / "demo.log"
    command = [sys.executable, "-m", "fakevllm", "demo", "--steps", str(steps)]
    command += ["--seed", str(seed), "--run-dir", str(run_dir)] + ["--gated"] * is_gated
    answers: list[Answer] = []
    with log_file.open("wb") as log:
        demo = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL
        )
    app = asyncio.create_task(rate_answers(run_dir, seed, answers))
    try:
        async with asyncio.timeout(DEMO_TIMEOUT_S):
            code = await demo.wait()
    finally:
        if demo.returncode is None:
            demo.kill()
            await demo.wait()
        app.cancel()
        await _end_of_app(app, run_dir)
    assert code == 0, log_file.read_text()
    return _read(run_dir / "ledger.sqlite", answers, "--gated" if is_gated else "ungated")


async def _end_of_app(app: asyncio.Task[None], run_dir: Path) -> None:
    """Wait for the end of the cancelled app. Raise the app's errors, but not those after the last
    probe, because the demo then stops its proxy."""
    try:
        await app
    except asyncio.CancelledError:
        pass
    except ExceptionGroup:
        if not (run_dir / "probe_after.json").exists():
            raise


def _read(ledger_file: Path, answers: Sequence[Answer], name: str) -> list[Latencies]:
    with contextlib.closing(sqlite3.connect(ledger_file)) as ledger:
        feedbacks: list[tuple[float, int]] = ledger.execute(_TRAINED).fetchall()
        arms = dict(ledger.execute(_ARMS).fetchall())
    assert len(feedbacks) >= MIN_FEEDBACKS, f"only {len(feedbacks)} feedbacks were trained"
    measured = [latencies(name, feedbacks, answers)]
    if any(arms.values()):
        released = [one for one in answers if arms.get(one.group_id) == "released"]
        measured.append(latencies(name, feedbacks, released, "released"))
    return measured


async def _measure(folder: Path, seeds: int, steps: int) -> list[Latencies]:
    measured: list[Latencies] = []
    for seed in range(seeds):
        for is_gated in (False, True):
            kind = "gated" if is_gated else "ungated"
            measured += await run(folder / f"{kind}-{seed}", seed, steps, is_gated=is_gated)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="number of training steps")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--keep", type=Path, help="run in this new folder, and keep it")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    run_conditions = conditions()
    with tempfile.TemporaryDirectory() as temporary:
        measured = asyncio.run(_measure(args.keep or Path(temporary), args.seeds, args.steps))
    rows = [one.cells() for one in measured]
    print_table(HEADER, rows)
    if args.write:
        legend = (
            "From the moment in which the proxy has stored a thumb until the app has the first "
            "whole answer of a version that trained on it. Each of the app's "
            f"{NUM_USERS} users sends a question every {MEAN_PAUSE_S} s on average, beside the "
            "demo's own eight. Feedback that was sent before its API key had eight waits for "
            "them, and is counted too. So is feedback without such an answer before the end of "
            "the run: its latency is longer than all others."
        )
        replace_section(TITLE, f"{run_conditions}\n{markdown_table(HEADER, rows)}\n{legend}")


if __name__ == "__main__":
    main()
