"""Many rows at once: bounded concurrency, patience with a proxy that restarts, one note per row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

import aiohttp
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from fakevllm.errors import ConfigError
from fakevllm.replay.players import Player, RowFailed, RowInterrupted
from fakevllm_adapters.swarm import Task

PATIENCE_S = 120.0
"""How long one row is played again while the way to the model is cut."""
TASKS_PER_CALL = 500


@dataclass(frozen=True, slots=True)
class Played:
    """One row's end."""

    epoch: int
    task: Task
    answer: str | None
    failed: str | None


async def play(
    rows: Iterable[tuple[int, Task]],
    player: Player,
    key_of: Callable[[Task], str],
    concurrency: int,
) -> AsyncIterator[Played]:
    """Ends of rows as they come. `rows` may be endless: no more than `concurrency` are taken
    ahead."""
    source = iter(rows)
    running: set[asyncio.Task[Played]] = set()
    try:
        while True:
            while len(running) < concurrency and (row := next(source, None)) is not None:
                running.add(asyncio.create_task(_play_one(*row, player, key_of(row[1]))))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _play_one(epoch: int, task: Task, player: Player, key: str) -> Played:
    tries = AsyncRetrying(
        retry=retry_if_exception_type(RowInterrupted),
        wait=wait_random_exponential(multiplier=0.2, max=2),
        stop=stop_after_delay(PATIENCE_S),
        reraise=True,
    )
    try:
        return Played(epoch, task, await tries(player.play, task.main_query, key), None)
    except (RowFailed, RowInterrupted) as error:
        return Played(epoch, task, None, str(error))


async def register(url: str, tasks: list[Task]) -> dict[str, str]:
    """Makes the tasks known to the proxy; returns the API key of each by its id. Raises
    ConfigError."""
    keys: dict[str, str] = {}
    try:
        async with aiohttp.ClientSession() as http:
            for start in range(0, len(tasks), TASKS_PER_CALL):
                part = tasks[start : start + TASKS_PER_CALL]
                body = {"tasks": [task.model_dump() for task in part]}
                async with http.post(f"{root_of(url)}/fakevllm/tasks", json=body) as answer:
                    answer.raise_for_status()
                    given: list[str] = (await answer.json())["keys"]
                keys |= dict(zip([task.task_id for task in part], given, strict=True))
    except aiohttp.ClientError as error:
        raise ConfigError(
            f"No fakevllm proxy answers at {url} ({error}): start it, or set --url."
        ) from None
    return keys


async def first_model(url: str) -> str:
    """The first model the proxy lists. Raises ConfigError."""
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/models") as answer:
            answer.raise_for_status()
            return (await answer.json())["data"][0]["id"]
    except aiohttp.ClientError as error:
        raise ConfigError(
            f"{url} lists no model ({error}): is the engine up? Or set --model."
        ) from None


def root_of(url: str) -> str:
    """The proxy itself, without the `/v1` that apps are given."""
    return url.rstrip("/").removesuffix("/v1")
