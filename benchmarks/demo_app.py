"""An app beside a demo's replay: each of its requests is a task of its own, so that what became of
it can be told afterwards."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import openai

from fakevllm.demo.sums import BELOW
from fakevllm.errors import ConfigError
from fakevllm.replay.proxy import first_model, register
from fakevllm_adapters.swarm import Task

MAX_REQUESTS = 2_000
NUM_USERS = 2
"""One reads whole answers, the other streams."""
MEAN_PAUSE_S = 0.3
ASK_AGAIN_S = 0.2
"""After an error that the client gave up on, and before there is a proxy."""
MAX_TOKENS = 24


@dataclass(slots=True)
class Asked:
    """One request, however often it was sent."""

    name: str
    """Of its task."""
    began: float
    """By time.time(), as all times here."""
    ended: float | None = None
    """When it was answered."""
    errors: list[str] = field(default_factory=list[str])
    """What the app saw behind the retries of its client."""


async def ask_beside(run_dir: Path, seed: int, heard: list[Asked]) -> None:
    """Until cancelled: OpenAI's package as it comes, and an app that asks again what failed."""
    url = await _url_of(run_dir)
    chance = random.Random(f"app {seed}")
    sums = [(chance.randrange(BELOW), chance.randrange(BELOW)) for _ in range(MAX_REQUESTS)]
    tasks = {f"beside-{at}": _task(f"beside-{at}", *pair) for at, pair in enumerate(sums)}
    model, keys = await _introduced(url, list(tasks.values()))
    numbers = itertools.count()
    async with asyncio.TaskGroup() as users:
        for user in range(NUM_USERS):
            is_streamed = user % 2 == 1
            users.create_task(_use(url, model, tasks, keys, numbers, chance, heard, is_streamed))


def _task(name: str, a: int, b: int) -> Task:
    return Task(task_id=name, main_query=f"What is {a} plus {b}?", metadata={"sum": a + b})


async def _url_of(run_dir: Path) -> str:
    """As the demo wrote it down for its proxy."""
    config = run_dir / "fakevllm.toml"
    while not config.exists() or not (text := config.read_text()):
        await asyncio.sleep(ASK_AGAIN_S)
    return f"http://127.0.0.1:{tomllib.loads(text)['proxy']['port']}/v1"


async def _introduced(url: str, tasks: list[Task]) -> tuple[str, dict[str, str]]:
    """The model's name, and the key of each task."""
    while True:
        try:
            return await first_model(url), await register(url, tasks)
        except (ConfigError, aiohttp.ClientError):
            await asyncio.sleep(ASK_AGAIN_S)


async def _use(
    url: str,
    model: str,
    tasks: Mapping[str, Task],
    keys: Mapping[str, str],
    numbers: itertools.count[int],
    chance: random.Random,
    heard: list[Asked],
    is_streamed: bool,
) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="set for each request") as client:
        while True:
            asked = Asked(f"beside-{next(numbers)}", time.time())
            heard.append(asked)
            own = client.with_options(api_key=keys[asked.name])
            while asked.ended is None:
                try:
                    await _answer(own, model, tasks[asked.name].main_query, is_streamed)
                    asked.ended = time.time()
                except (openai.OpenAIError, HalfAnAnswer) as error:
                    asked.errors.append(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(ASK_AGAIN_S)
            await asyncio.sleep(chance.expovariate(1 / MEAN_PAUSE_S))


class HalfAnAnswer(Exception):
    """A stream that broke off."""


async def _answer(client: openai.AsyncOpenAI, model: str, question: str, is_streamed: bool) -> None:
    asked = client.chat.completions
    if not is_streamed:
        await asked.create(
            model=model, messages=[{"role": "user", "content": question}], max_tokens=MAX_TOKENS
        )
        return
    chunks = await asked.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        stream=True,
    )
    reasons: list[str] = []
    try:
        async for chunk in chunks:
            reasons += [
                str(choice.finish_reason) for choice in chunk.choices if choice.finish_reason
            ]
    except Exception as error:  # httpx's, which the package lets through inside a stream
        if isinstance(error, openai.OpenAIError):
            raise
        raise HalfAnAnswer(f"{type(error).__name__}: {error}") from error
    if not reasons:
        raise HalfAnAnswer("no finish reason")
