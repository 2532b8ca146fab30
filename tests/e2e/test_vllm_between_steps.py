"""With vLLM, which holds one set of weights, training waits while a version is evaluated, and goes
back from one that got worse."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fakevllm.demo.tasks import held_out_rows, training_tasks
from fakevllm.replay.proxy_queries import register_tasks
from fakevllm_adapters.protocol.swarm import Task
from tests.e2e.hook_files import write_hooks
from tests.e2e.ledgers import rows
from tests.e2e.processes import Process, Processes
from tests.e2e.release_stack import history

pytestmark = [pytest.mark.real, pytest.mark.slow]

READY_TIMEOUT_S = 300.0
NUM_USERS = 8
NUM_BAD = 10
"""Number of steps that train with the opposite rewards."""
NUM_DRAWS = 60
SETTINGS = f"""
[job]
batch_size = 8
num_repeat = 8
lr = 5e-4
ppo_epochs = 2

[release]
mode = "gated"
evaluation = "between_steps"
eval_dataset = "held_out.jsonl"
evaluate_every = {NUM_BAD}
eval_samples = 4
max_samples = {4 * NUM_DRAWS}
"""
HOOK = "from fakevllm.demo.hooks.on_compute_relative_reward import on_compute_relative_reward\n"
REWARDS = """
    SELECT AVG(s.reward) FROM groups AS g JOIN siblings AS s USING (group_id)
    WHERE g.kind = 'eval' AND g.eval_version = ? AND s."index" > 0
"""


@pytest.mark.timeout(600)
def test_vllm_with_full_updates_goes_back_from_a_version_that_got_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKEVLLM_INVERT_REWARDS", f"0:{NUM_BAD - 1}")
    (tmp_path / "held_out.jsonl").write_text(held_out_rows())
    config = tmp_path / "fakevllm.toml"
    config.write_text(SETTINGS.replace("held_out.jsonl", str(tmp_path / "held_out.jsonl")))
    hooks = str(write_hooks(tmp_path / "hooks", HOOK))
    with Processes(tmp_path) as started:
        server = started.server("--rollout", "vllm", "--trainer", "embedded", "--model", "demo")
        proxy = started.proxy(server, "--config", str(config), "--hooks", hooks, wait=False)
        proxy.wait_until_healthy(READY_TIMEOUT_S)
        asyncio.run(ask_until_restored(proxy, server))
        decisions = [(one["decision"], one["version"]) for one in history(server)]
        evidence = history(server)[-1]["evidence"]
        restored = max(releases(server)["released_copies"])
        means = {one: rows(proxy, REWARDS, one)[0][0] for one in (0, NUM_BAD, restored)}
    print(f"{decisions}, {evidence['pairs']} pairs, mean rewards by version: {means}")
    assert decisions == [("candidate", NUM_BAD), ("rejected", NUM_BAD)]
    assert (evidence["restored"], evidence["high"] < -0.05) == (0, True)
    assert restored > NUM_BAD
    # 240 samples of the same rows have a standard error of about 0.03.
    assert abs(means[restored] - means[0]) < 0.15 < means[0] - means[NUM_BAD]


def releases(server: Process) -> dict[str, Any]:
    return httpx.get(f"{server.url}/releases", timeout=30).json()


async def ask_until_restored(proxy: Process, server: Process) -> None:
    """Let users ask sums until training has gone back, and the restored weights have made the next
    reference."""
    tasks = training_tasks()
    keys = await register_tasks(f"{proxy.url}/v1", tasks)
    is_over = asyncio.Event()

    async def user(turns: Iterator[Task]) -> None:
        async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="sk") as app:
            while not is_over.is_set():
                task = next(turns)
                reply = await app.with_options(api_key=keys[task.task_id]).chat.completions.create(
                    model="demo",
                    messages=[{"role": "user", "content": task.main_query}],
                    max_tokens=24,
                )
                assert reply.model == "demo"

    async def look() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            while not is_over.is_set():
                state = (await client.get("/releases")).json()
                limit = state["training_limit"]
                if state["rejected"] and limit is not None and limit > max(state["rejected"]):
                    is_over.set()
                await asyncio.sleep(0.5)

    async with asyncio.timeout(240), asyncio.TaskGroup() as group:
        group.create_task(look())
        for number in range(NUM_USERS):
            start = number * len(tasks) // NUM_USERS
            group.create_task(user(itertools.cycle(tasks[start:] + tasks[:start])))
