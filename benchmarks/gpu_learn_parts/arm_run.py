"""Run one arm: start a server and a proxy on the model, measure it on held-out questions, train it
through the proxy, and measure it again.

    python -m benchmarks.gpu_learn_parts.arm_run --name n8 --size tiny --device cpu --model FOLDER
        --out FOLDER --json FILE

All arms take the same number of steps, and sample the same number of answers for each step. An arm
with 2 answers to each question asks four times as many questions as one with 8.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sqlite3
import time
from collections.abc import Collection
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import openai

from benchmarks.gpu_learn_parts.arms import ARMS, Arm, ArmRun, HeldOutRewards, held_out_rewards
from benchmarks.gpu_learn_parts.sizes import SIZES, Reinforcement, Size
from benchmarks.gpu_learn_parts.tasks import dataset
from benchmarks.run_log_reader import read_step_entries
from fakevllm.admission.dataset import endless_rows, read_tasks
from fakevllm.evaluation.command import EvalSettings, run_eval
from fakevllm.replay.backpressure import follow_capacity
from fakevllm.replay.proxy_queries import first_model, register_tasks
from fakevllm.replay.row_runner import play
from fakevllm.replay.row_senders import EndpointPlayer
from fakevllm_adapters.protocol.swarm import EngineStatusReply, Task
from tests.e2e.processes import Process, Processes

Json = dict[str, Any]
HOOK = Path(__file__).parent / "hook.py"
POLL_EVERY_S = 0.2
STATUS_TIMEOUT_S = 10.0


class Progress:
    """The progress of training, which is polled from the proxy."""

    def __init__(self, proxy_url: str, num_steps: int, deadline: float) -> None:
        self._url = f"{proxy_url}/fakevllm/engine"
        self._num_steps = num_steps
        self._deadline = deadline
        self.status: EngineStatusReply | None = None

    @property
    def is_complete(self) -> bool:
        step = self.status.global_step if self.status is not None else None
        return (step or 1) > self._num_steps

    @property
    def is_over(self) -> bool:
        return self.is_complete or time.monotonic() > self._deadline

    async def poll(self) -> None:
        timeout = aiohttp.ClientTimeout(total=STATUS_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as http,
            http.get(self._url) as answer,
        ):
            self.status = EngineStatusReply.model_validate_json(await answer.read())

    async def keep_polling(self) -> None:
        while not self.is_over:
            await self.poll()
            await asyncio.sleep(POLL_EVERY_S)


def write_config(file: Path, arm: Arm, plan: Reinforcement, seed: int) -> None:
    """Write the proxy's configuration, with the training job."""
    job: Json = {
        "num_repeat": arm.num_siblings,
        "batch_size": plan.answers_per_step // arm.num_siblings,
        "lr": plan.lr,
        "ppo_epochs": 2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "seed": seed,
        "control": arm.control,
        "total_training_steps": plan.num_steps,
    }
    lines = ["[hooks]", f"path = {json.dumps(str(HOOK))}", "", "[job]"]
    file.write_text("\n".join([*lines, *(f"{key} = {json.dumps(job[key])}" for key in job), ""]))


def write_rows(folder: Path, size: Size, seed: int) -> tuple[Path, Path]:
    """Write the rows for training and the held-out rows, and return the two files."""
    plan = size.reinforcement
    files = folder / "training.jsonl", folder / "held_out.jsonl"
    counts = plan.rows_per_kind, plan.held_out_per_kind
    for file, count, is_held_out in zip(files, counts, (False, True), strict=True):
        rows = dataset(size.kinds, count, seed, held_out=is_held_out)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def measure(proxy: Process, held_out: Path, json_file: Path, plan: Reinforcement) -> HeldOutRewards:
    """Measure the model on the held-out rows, as `fakevllm eval` does. The proxy refuses rows that
    were trained."""
    settings = EvalSettings(
        held_out,
        "question",
        f"{proxy.url}/v1",
        num_samples=plan.samples,
        json_file=json_file,
        concurrency=plan.concurrency,
        max_tokens=plan.max_tokens,
    )
    run_eval(settings)
    rows = [json.loads(line) for line in held_out.read_text().splitlines()]
    return held_out_rewards(json.loads(json_file.read_text()), rows)


def num_answers(ledger: Path, group_ids: Collection[str]) -> int:
    """Return the number of answers in these groups. The server's log does not have the answers of
    an arm that trains none."""
    with closing(sqlite3.connect(ledger)) as db:
        counts = db.execute("SELECT group_id, COUNT(*) FROM siblings GROUP BY group_id")
        return sum(count for group_id, count in counts if group_id in group_ids)


async def train(
    proxy: Process,
    tasks: list[Task],
    seed: int,
    progress: Progress,
    *,
    max_tokens: int,
    concurrency: int,
) -> None:
    """Send questions through the proxy until the last step is done or the time is over. An answer
    has at most `max_tokens` tokens, and `concurrency` questions are sent at the same time."""
    url = f"{proxy.url}/v1"
    keys = await register_tasks(url, tasks)
    http = openai.DefaultAioHttpClient()
    player = EndpointPlayer(url, await first_model(url), http, max_tokens)
    rows = itertools.takewhile(lambda _: not progress.is_over, endless_rows(tasks, seed))
    polling = asyncio.create_task(progress.keep_polling())
    try:
        async with follow_capacity(proxy.url) as capacity:
            results = play(rows, player, lambda task: keys[task.task_id], concurrency, capacity)
            async for result in results:
                if result.failed is not None:
                    raise SystemExit(f"A question got no answer: {result.failed}")
        await polling
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        await http.aclose()
    await progress.poll()


def run_arm(
    arm: Arm, size: Size, model: Path, device: str, folder: Path, seed: int, deadline: float
) -> ArmRun:
    """Run the arm in a new folder, and return its figures. Training ends at `deadline`, a time of
    time.monotonic()."""
    started = time.monotonic()
    folder.mkdir(parents=True)
    plan = size.reinforcement
    config = folder / "fakevllm.toml"
    write_config(config, arm, plan, seed)
    training, held_out = write_rows(folder, size, seed)
    with Processes(folder) as started_processes:
        server = started_processes.server(
            *("--backend", "embedded", "--model", str(model), "--seed", str(seed)),
            *(f"--engine-arg=--device={device}", "--track", "none"),
        )
        proxy = started_processes.proxy(server, "--config", str(config))
        ready = time.monotonic()
        before = measure(proxy, held_out, folder / "eval_start.json", plan)
        progress = Progress(proxy.url, plan.num_steps, deadline)
        trains_from = time.monotonic()
        training_run = train(
            proxy,
            read_tasks(training, "question"),
            seed,
            progress,
            max_tokens=plan.max_tokens,
            concurrency=plan.concurrency,
        )
        asyncio.run(training_run)
        trains_until = time.monotonic()
        after = measure(proxy, held_out, folder / "eval_end.json", plan)
        entries = read_step_entries(server.folder)
        groups = [group for entry in entries for group in entry["groups"]]
        return ArmRun(
            steps=len(entries),
            questions=len(groups),
            answers=num_answers(
                proxy.folder / "ledger.sqlite", {group["group_id"] for group in groups}
            ),
            updates=sum(entry["metrics"].get("grad_norm", 0.0) > 0 for entry in entries),
            is_complete=progress.is_complete,
            start=before,
            end=after,
            start_s=round(ready - started, 1),
            train_s=round(trains_until - trains_from, 1),
            seconds=round(time.monotonic() - started, 1),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--name", choices=list(ARMS), required=True)
    parser.add_argument("--size", choices=list(SIZES), required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the run")
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=180.0, help="seconds until training ends")
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit_s
    run = run_arm(
        *(ARMS[options.name], SIZES[options.size], options.model.resolve(), options.device),
        *(options.out.resolve(), options.seed, deadline),
    )
    options.json.write_text(json.dumps(asdict(run), indent=1))
    print(f"{options.name}: {run.steps} steps, {run.answers} answers, {run.seconds} s")


if __name__ == "__main__":
    main()
