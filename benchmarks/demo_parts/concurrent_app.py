"""An app that sends requests to a demo's proxy while the demo replays its dataset.

Each request has a task of its own. By this task, the groups of the request can be found in the
ledger afterwards.
"""

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
"""Number of requests after which the app stops. A fast machine sends them in ten minutes."""
NUM_USERS = 2
"""Number of users. The first user requests whole answers, and the second user requests streams."""
MEAN_PAUSE_S = 0.3
RETRY_PAUSE_S = 0.2
"""Seconds between two attempts, after an error that the client library did not retry, and while the
proxy starts."""
MAX_TOKENS = 24


@dataclass(slots=True)
class AppRequest:
    """One request of the app with all its retries."""

    name: str
    """Id of the request's task."""
    started_at: float
    """Unix time in seconds, from time.time()."""
    answered_at: float | None = None
    """Unix time in seconds. None if the request was not answered."""
    errors: list[str] = field(default_factory=list[str])
    """Errors that the client library raised after its own retries."""


async def run_app(run_dir: Path, seed: int, requests: list[AppRequest]) -> None:
    """Send requests through OpenAI's package until cancelled, and append each to `requests`.

    The app sends a request again until it is answered.
    """
    url = await demo_proxy_url(run_dir)
    chance = random.Random(f"app {seed}")
    sums = [(chance.randrange(BELOW), chance.randrange(BELOW)) for _ in range(MAX_REQUESTS)]
    tasks = [_task(f"beside-{index}", *pair) for index, pair in enumerate(sums)]
    model, keys = await register_until_ready(url, tasks)
    app, open_tasks = App(url, model, keys, chance, requests), iter(tasks)
    async with asyncio.TaskGroup() as users:
        for user in range(NUM_USERS):
            users.create_task(app.run_user(open_tasks, is_streamed=user % 2 == 1))


def _task(name: str, a: int, b: int) -> Task:
    return Task(task_id=name, main_query=f"What is {a} plus {b}?", metadata={"sum": a + b})


async def demo_proxy_url(run_dir: Path) -> str:
    """Return the proxy's URL from the configuration that the demo writes for it."""
    config = run_dir / "fakevllm.toml"
    while not config.exists() or not (text := config.read_text()):
        await asyncio.sleep(RETRY_PAUSE_S)
    return f"http://127.0.0.1:{tomllib.loads(text)['proxy']['port']}/v1"


async def register_until_ready(url: str, tasks: list[Task]) -> tuple[str, dict[str, str]]:
    """Register the tasks at the proxy, and return the model's name and a key for each task."""
    while True:
        try:
            return await first_model(url), await register_tasks(url, tasks)
        except (ConfigError, aiohttp.ClientError):
            await asyncio.sleep(RETRY_PAUSE_S)


@dataclass(frozen=True, slots=True)
class App:
    """An app with several users."""

    url: str
    model: str
    keys: Mapping[str, str]
    """API key by task id."""
    chance: random.Random
    requests: list[AppRequest]

    async def run_user(self, tasks: Iterator[Task], *, is_streamed: bool) -> None:
        """Send the requests of the tasks one after another. Send a request only when the previous
        request is answered."""
        async with openai.AsyncOpenAI(base_url=self.url, api_key="one a task") as client:
            for task in tasks:
                request = AppRequest(task.task_id, time.time())
                self.requests.append(request)
                task_client = client.with_options(api_key=self.keys[task.task_id])
                while request.answered_at is None:
                    try:
                        await self._send(task_client, task.main_query, is_streamed)
                        request.answered_at = time.time()
                    except (openai.OpenAIError, httpx.HTTPError, IncompleteStream) as error:
                        request.errors.append(f"{type(error).__name__}: {error}")
                        await asyncio.sleep(RETRY_PAUSE_S)
                await asyncio.sleep(self.chance.expovariate(1 / MEAN_PAUSE_S))

    async def _send(self, client: openai.AsyncOpenAI, question: str, is_streamed: bool) -> None:
        """Send a question and read the whole answer.

        Raises openai.OpenAIError if the openai package reports an error. Raises httpx.HTTPError if
        the connection breaks during a stream, because the package does not translate this error.
        Raises IncompleteStream if the stream ends without a finish reason.
        """
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
            raise IncompleteStream("no finish reason")


class IncompleteStream(Exception):
    """A stream that ended without a finish reason."""
