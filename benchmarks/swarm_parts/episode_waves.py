"""Waves of episodes. All episodes of a wave are claimed at once, make one call each, and are ended
at once."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.proxy_parts.process_cpu import cpu_seconds
from tests.e2e.processes import Process

Json = dict[str, Any]

NUM_REPEAT = 4
BATCH_SIZE = 10_000
"""Number of groups per step. The number is so large that no step is made. The CPU time of a step
would be counted as CPU time of the ends of episodes."""
JOB = f"job: {{num_repeat: {NUM_REPEAT}, batch_size: {BATCH_SIZE}}}"
IDLE_LIMIT_S = 600
CALLS_AT_ONCE = 32
"""Maximum number of concurrent model calls. Calls are not measured here."""


@dataclass(slots=True)
class RequestCost:
    """CPU time and latencies of one kind of request, from all waves."""

    cpu_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list[float])

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds per request."""
        return 1000 * self.cpu_s / len(self.latencies_s)


@dataclass(frozen=True, slots=True)
class Target:
    """A server that receives the waves."""

    name: str
    process: Process
    has_model: bool = True
    """Whether episodes at this server can call a model. At the baseline server, they cannot."""


@dataclass(slots=True)
class Sample:
    """Cost of claims and ends at one target, for one number of episodes at once."""

    claims: RequestCost = field(default_factory=RequestCost)
    ends: RequestCost = field(default_factory=RequestCost)

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds per episode."""
        return self.claims.cpu_ms + self.ends.cpu_ms


class Waves:
    """A client that claims, calls and ends episodes."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self._numbers = itertools.count()

    async def start_engine(self, target: Target) -> float:
        """Start the engine, wait until episodes can be claimed, and return the seconds from the
        start until then."""
        started = time.perf_counter()
        await self._post(f"{target.process.url}/sync_train_config", {"yaml_as_string": JOB})
        await self._post(f"{target.process.url}/start_engine", {})
        await self._wait_until_rolling(target)
        return time.perf_counter() - started

    async def _wait_until_rolling(self, target: Target) -> None:
        async with asyncio.timeout(120):
            while True:
                async with self._http.get(f"{target.process.url}/get_engine_status") as answer:
                    if (await answer.json())["engine_status"] == "ENGINE.ROLLING":
                        return
                await asyncio.sleep(0.05)

    async def run(self, target: Target, at_once: int, sample: Sample) -> None:
        """Run one wave of `at_once` episodes, and add its cost to `sample`."""
        url = target.process.url
        claim = {
            "client_uuid": "a client",
            "episode_type": "train",
            "discard_episode_timeout": IDLE_LIMIT_S,
        }
        claims = [lambda: self._post(f"{url}/claim_episode", claim)] * at_once
        claimed = await self._send_all(target, claims, sample.claims)
        if target.has_model:
            await self._call_all(claimed)
        ends = [self._end_request(url, episode["episode_uuid"]) for episode in claimed]
        await self._send_all(target, ends, sample.ends)

    async def _send_all(
        self,
        target: Target,
        requests: Sequence[Callable[[], Coroutine[Any, Any, Json]]],
        cost: RequestCost,
    ) -> list[Json]:
        async def send(request: Callable[[], Coroutine[Any, Any, Json]]) -> Json:
            started = time.perf_counter()
            reply = await request()
            cost.latencies_s.append(time.perf_counter() - started)
            assert reply["success"], reply
            return reply

        cpu = cpu_seconds(target.process.pid)
        replies = await asyncio.gather(*(send(request) for request in requests))
        cost.cpu_s += cpu_seconds(target.process.pid) - cpu
        return replies

    def _end_request(self, url: str, uuid: str) -> Callable[[], Coroutine[Any, Any, Json]]:
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
        slots = asyncio.Semaphore(CALLS_AT_ONCE)
        messages = [{"role": "user", "content": "[[say yes]]"}]

        async def call(episode: Json) -> None:
            url = f"{episode['openai_base_url']}/chat/completions"
            key = {"Authorization": f"Bearer {episode['openai_api_key']}"}
            async with slots:
                await self._post(url, {"model": "fake", "messages": messages}, key)

        await asyncio.gather(*(call(episode) for episode in claimed))

    async def _post(self, url: str, body: Json, headers: dict[str, str] | None = None) -> Json:
        async with self._http.post(url, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.json()
