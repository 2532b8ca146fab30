"""Hook calls as the proxy makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.results import RewardOutcome
from fakevllm.hooks.spec import Sibling, Task

TASK = Task(task_id="t", metadata={"answer": "42"})
Start = Callable[..., Awaitable[HookWorker]]


async def reward(worker: HookWorker, *contents: str, question: str = "q") -> RewardOutcome:
    answers: list[dict[str, Any]] = [
        {"role": "assistant", "content": content, "finish_reason": "stop"} for content in contents
    ]
    messages = [{"role": "user", "content": question}]
    siblings = [Sibling(i, TASK, f"g/{i}", "stop", {"i": i}, messages) for i in range(len(answers))]
    return await worker.reward(siblings, answers, question)


async def until_exists(path: Path) -> None:
    async with asyncio.timeout(20):
        while not path.exists():
            await asyncio.sleep(0.01)
