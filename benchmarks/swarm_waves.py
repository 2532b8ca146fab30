"""Waves of episodes: all of a wave claimed at once, called once each, and ended at once."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.proxy_overhead import cpu_seconds
from tests.e2e.processes import Process

Json = dict[str, Any]

NUM_REPEAT = 4
BATCH_SIZE = 10_000
"""Groups. No step is taken: its CPU would be the trainer's, and not that of an end."""
JOB = f"job: {{num_repeat: {NUM_REPEAT}, batch_size: {BATCH_SIZE}}}"
IDLE_LIMIT_S = 600
CALLS_AT_ONCE = 32
"""They are not measured here."""


@dataclass(slots=True)
class Taken:
    """One kind of request, summed over the waves."""

    cpu_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list[float])

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu_s / len(self.latencies_s)


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    process: Process
    has_model: bool = True
    """Whether its episodes are for calling a model, as ours are."""


@dataclass(slots=True)
class Sample:
    """What one target takes for episodes, so many at once."""

    claims: Taken = field(default_factory=Taken)
    ends: Taken = field(default_factory=Taken)

    @property
    def cpu_ms(self) -> float:
        """For one episode."""
        return self.claims.cpu_ms + self.ends.cpu_ms


class Waves:
    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self._numbers = itertools.count()

    async def start_engine(self, target: Target) -> float:
        """Until episodes can be claimed of it; how many seconds that takes."""
        started = time.perf_counter()
        await self._post(f"{target.process.url}/sync_train_config", {"yaml_as_string": JOB})
        await self._post(f"{target.process.url}/start_engine", {})
        await self._until_rolling(target)
        return time.perf_counter() - started

    async def _until_rolling(self, target: Target) -> None:
        async with asyncio.timeout(120):
            while True:
                async with self._http.get(f"{target.process.url}/get_engine_status") as answer:
                    if (await answer.json())["engine_status"] == "ENGINE.ROLLING":
                        return
                await asyncio.sleep(0.05)

    async def run(self, target: Target, at_once: int, sample: Sample) -> None:
        """One wave."""
        url = target.process.url
        claim = {
            "client_uuid": "a client",
            "episode_type": "train",
            "discard_episode_timeout": IDLE_LIMIT_S,
        }
        claims = [lambda: self._post(f"{url}/claim_episode", claim)] * at_once
        claimed = await self._timed(target, claims, sample.claims)
        if target.has_model:
            await self._call_all(claimed)
        ends = [self._end(url, one["episode_uuid"]) for one in claimed]
        await self._timed(target, ends, sample.ends)

    async def _timed(
        self, target: Target, asks: Sequence[Callable[[], Coroutine[Any, Any, Json]]], taken: Taken
    ) -> list[Json]:
        async def timed(ask: Callable[[], Coroutine[Any, Any, Json]]) -> Json:
            started = time.perf_counter()
            reply = await ask()
            taken.latencies_s.append(time.perf_counter() - started)
            assert reply["success"], reply
            return reply

        cpu = cpu_seconds(target.process.pid)
        replies = await asyncio.gather(*(timed(ask) for ask in asks))
        taken.cpu_s += cpu_seconds(target.process.pid) - cpu
        return replies

    def _end(self, url: str, uuid: str) -> Callable[[], Coroutine[Any, Any, Json]]:
        number = next(self._numbers)
        task_id = f"task {number // NUM_REPEAT}"
        body = {
            "client_uuid": "a client",
            "episode_uuid": uuid,
            "task_id": task_id,
            "workflow_output": {"reward": number % NUM_REPEAT, "metadata": {"task_id": task_id}},
        }
        return lambda: self._post(f"{url}/end_episode", body)

    async def _call_all(self, claimed: Sequence[Json]) -> None:
        free = asyncio.Semaphore(CALLS_AT_ONCE)
        messages = [{"role": "user", "content": "[[say yes]]"}]

        async def call(one: Json) -> None:
            url = f"{one['openai_base_url']}/chat/completions"
            key = {"Authorization": f"Bearer {one['openai_api_key']}"}
            async with free:
                await self._post(url, {"model": "fake", "messages": messages}, key)

        await asyncio.gather(*(call(one) for one in claimed))

    async def _post(self, url: str, body: Json, headers: dict[str, str] | None = None) -> Json:
        async with self._http.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()
