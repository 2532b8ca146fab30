"""An app beside a demo's replay: each of its requests is a task of its own, so that what became of
it can be told afterwards."""

from __future__ import annotations

import asyncio
import random
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
import httpx
import openai

from fakevllm.demo.tasks import BELOW
from fakevllm.errors import ConfigError
from fakevllm.replay.proxy_queries import first_model, register_tasks
from fakevllm_adapters.protocol.swarm import Task

MAX_REQUESTS = 2_000
"""Then it falls silent: ten minutes of a quick machine."""
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
    """Until cancelled: OpenAI's package as it comes, and an app that asks again what failed. Puts
    what it asks into `heard`."""
    url = await _url_of(run_dir)
    chance = random.Random(f"app {seed}")
    sums = [(chance.randrange(BELOW), chance.randrange(BELOW)) for _ in range(MAX_REQUESTS)]
    tasks = [_task(f"beside-{at}", *pair) for at, pair in enumerate(sums)]
    model, keys = await _introduced(url, tasks)
    app, to_ask = App(url, model, keys, chance, heard), iter(tasks)
    async with asyncio.TaskGroup() as users:
        for user in range(NUM_USERS):
            users.create_task(app.use(to_ask, is_streamed=user % 2 == 1))


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
            return await first_model(url), await register_tasks(url, tasks)
        except (ConfigError, aiohttp.ClientError):
            await asyncio.sleep(ASK_AGAIN_S)


@dataclass(frozen=True, slots=True)
class App:
    url: str
    model: str
    keys: Mapping[str, str]
    """By task."""
    chance: random.Random
    heard: list[Asked]

    async def use(self, tasks: Iterator[Task], *, is_streamed: bool) -> None:
        """One user, who takes the next task when the one before is answered."""
        async with openai.AsyncOpenAI(base_url=self.url, api_key="one a task") as client:
            for task in tasks:
                asked = Asked(task.task_id, time.time())
                self.heard.append(asked)
                own = client.with_options(api_key=self.keys[task.task_id])
                while asked.ended is None:
                    try:
                        await self._ask(own, task.main_query, is_streamed)
                        asked.ended = time.time()
                    except (openai.OpenAIError, httpx.HTTPError, HalfAnAnswer) as error:
                        asked.errors.append(f"{type(error).__name__}: {error}")
                        await asyncio.sleep(ASK_AGAIN_S)
                await asyncio.sleep(self.chance.expovariate(1 / MEAN_PAUSE_S))

    async def _ask(self, client: openai.AsyncOpenAI, question: str, is_streamed: bool) -> None:
        """Raises httpx.HTTPError for what the package lets through inside a stream."""
        create = partial(
            client.chat.completions.create,
            model=self.model,
            messages=[{"role": "user", "content": question}],
            max_tokens=MAX_TOKENS,
        )
        if not is_streamed:
            await create()
            return
        chunks = [chunk async for chunk in await create(stream=True)]
        if not any(choice.finish_reason for chunk in chunks for choice in chunk.choices):
            raise HalfAnAnswer("no finish reason")


class HalfAnAnswer(Exception):
    """A stream that ended too soon."""
