"""A small engine behind a real swarm server: no app is worse off because of siblings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from fakevllm.swarm import load_probe, server_connection
from fakevllm_adapters.http.asgi import Receive, Scope, Send, send_bytes
from fakevllm_server.backends.fake.engine import FakeEngine
from fakevllm_server.backends.http.engine_server import create_app as engine_app
from fakevllm_server.backends.http.preparation import PreparationThreads
from fakevllm_server.types.sampling import Sampling, Token
from tests.fuzz.in_process_stack import Stack, listening, proxy_over, swarm_over
from tests.proxy.groups.test_serve_policies import CHAT, JSON, TAKEN, chat, groups, policy, settled
from tests.proxy.scripted_swarm import until

COMPLETIONS = "/v1/completions"
QUEUE = "vllm:num_requests_waiting"
SLOW = "[[slow 0.01]] [[say aaaaa]]"


class SmallEngine(FakeEngine):
    """A fake engine with `num_slots` slots. It refuses further calls with `status`. If `status` is
    None, each choice of a call needs a slot, and further choices wait, as in vLLM."""

    def __init__(self, status: int | None, num_slots: int = 2) -> None:
        super().__init__(max_model_len=4096)
        self._app = engine_app(self, FakeEngine(), PreparationThreads())
        self._status = status
        self._free = asyncio.Semaphore(num_slots)
        self.num_refused = self.num_queued = self.max_waiting = self.num_probes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/metrics":
            metrics = f'{QUEUE}{{model_name="fake",engine="0"}} {self.num_queued}\n'
            self.num_probes += 1
            return await send_bytes(send, 200, metrics.encode(), [(b"content-type", b"text/plain")])
        if scope["path"] != CHAT or self._status is None:
            return await self._app(scope, receive, send)
        if self._free.locked():
            self.num_refused += 1
            refusal = orjson.dumps(
                {"error": {"message": "Too many requests.", "code": self._status}}
            )
            return await send_bytes(send, self._status, refusal, [(b"retry-after", b"1")])
        async with self._free:
            await self._app(scope, receive, send)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[list[Token]]:
        async with AsyncExitStack() as slot:
            if self._status is None:
                await self._wait(slot)
            batches = await slot.enter_async_context(
                aclosing(super().generate(prompt_ids, sampling))
            )
            async for tokens in batches:
                yield tokens

    async def _wait(self, slot: AsyncExitStack) -> None:
        self.num_queued += 1
        self.max_waiting = max(self.max_waiting, self.num_queued)
        try:
            await slot.enter_async_context(self._free)
        finally:
            self.num_queued -= 1


@asynccontextmanager
async def running(folder: Path, engine: SmallEngine, **sections: Any) -> AsyncGenerator[Stack]:
    async with AsyncExitStack() as stack:
        engine_url = await stack.enter_async_context(listening(engine))
        server_url, swarm = await stack.enter_async_context(swarm_over(folder, engine_url))
        proxy_url = await stack.enter_async_context(proxy_over(folder, server_url, **sections))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Stack(http, engine_url, server_url, proxy_url, swarm)


def probe_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe the queue frequently."""
    monkeypatch.setattr(load_probe, "PROBE_EVERY_S", 0.01)
    monkeypatch.setattr(server_connection, "POLL_EVERY_S", 0.01)


@pytest.mark.parametrize(("stream", "status"), [(False, 429), (True, 503)])
@pytest.mark.parametrize("serve", ["best", "lead", "greedy", "shadow"])
async def test_no_app_is_refused_because_of_siblings_of_the_proxy(
    tmp_path: Path, serve: str, stream: bool, status: int
) -> None:
    """Two apps send requests at the same time, and the engine has a slot for each."""
    engine = SmallEngine(status)
    sections = policy(tmp_path, 4, policy="lead" if serve == "shadow" else serve)
    sections["policy"] = {"shadow": serve == "shadow"}

    async def app(stack: Stack, name: str) -> list[int]:
        bodies = [chat(f"{name}{turn} {SLOW}", stream=stream) for turn in range(6)]
        return [(await ask(stack, body)).status for body in bodies]

    async def ask(stack: Stack, body: dict[str, Any]) -> Any:
        response = await stack.send(stack.proxy + CHAT, orjson.dumps(body), JSON)
        assert b'"error"' not in response.body
        return response

    async with running(tmp_path, engine, **sections) as stack:
        statuses = await asyncio.gather(app(stack, "a"), app(stack, "b"))
        assert statuses == [[200] * 6] * 2
        rows = await settled(stack, tmp_path, 12)
    assert engine.num_refused > 0, "the engine was never full"
    assert {row[6] for row in rows} == {200}


@pytest.mark.parametrize("kind", ["lead", "greedy"])
async def test_unawaited_siblings_do_not_pile_up_in_the_engines_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The app sends its next request as soon as it has an answer. With eight siblings per request,
    the engine has four times as much work as it can do. A large awaited group precedes them."""
    probe_often(monkeypatch)
    engine = SmallEngine(None)
    sections = policy(tmp_path, 8, policy=kind, routes={"completions": {"policy": "best"}})
    sections["policy"] = {"n": {"completions": 128}}
    async with running(tmp_path, engine, **sections) as stack:
        large = orjson.dumps({"model": "fake", "prompt": "yes or no?"})
        assert (await stack.send(stack.proxy + COMPLETIONS, large, JSON)).status == 200
        for turn in range(20):
            body = orjson.dumps(chat(f"{turn} {SLOW}"))
            assert (await stack.send(stack.proxy + CHAT, body, JSON)).status == 200
        before, *rows = await settled(stack, tmp_path, 21)
    assert (before[2], before[5]) == (128, None)
    cut = [row for row in rows if (row[5] or row[1] or "").startswith("engine_busy")]
    whole = [row for row in rows if row[:2] == TAKEN and row[5] is None]
    assert cut and whole, "groups are cut while the queue is long, and whole when it is short"


async def test_an_app_that_waits_only_for_its_lead_is_not_delayed_by_siblings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_often(monkeypatch)
    engine = SmallEngine(None, num_slots=1)
    body = orjson.dumps(chat("[[slow 0.02]] [[say " + "a" * 30 + "]]", stream=True))
    async with running(tmp_path, engine, **policy(tmp_path, 4, policy="lead")) as stack:
        first = asyncio.create_task(stack.send(stack.proxy + CHAT, body, JSON))
        await until(lambda: engine.num_queued == 3)
        num_probes_before = engine.num_probes
        await until(lambda: engine.num_probes >= num_probes_before + 2)
        assert (await stack.send(stack.proxy + CHAT, body, JSON)).status == 200
        assert (await first).status == 200
        rows = await settled(stack, tmp_path, 2)
    assert [row[2] for row in rows] == [4, 1] and rows[1][1] == "engine_busy: 0 of 3 fit"


async def test_awaited_siblings_are_all_sampled_however_long_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_often(monkeypatch)
    engine = SmallEngine(None)

    async def app(stack: Stack, name: str) -> None:
        for turn in range(4):
            body = orjson.dumps(chat(f"{name}{turn} {SLOW}"))
            assert (await stack.send(stack.proxy + CHAT, body, JSON)).status == 200

    async with running(tmp_path, engine, **policy(tmp_path, 4)) as stack:
        await asyncio.gather(*(app(stack, name) for name in "abc"))
        rows = await settled(stack, tmp_path, 12)
    assert engine.max_waiting > 4, "the queue was never long"
    assert {(*row[:3], row[5]) for row in rows} == {(*TAKEN, 4, None)}


async def test_a_greedy_lead_without_capacity_for_siblings_is_greedy_too(
    tmp_path: Path,
) -> None:
    engine = SmallEngine(None, num_slots=99)
    sections = policy(tmp_path, 3, policy="greedy", max_siblings_in_flight=1)
    async with running(tmp_path, engine, **sections) as stack:
        slow = orjson.dumps(chat("[[slow 0.05]] [[say " + "a" * 40 + "]]"))
        first = asyncio.create_task(stack.send(stack.proxy + CHAT, slow, JSON))
        await until(lambda: engine.max_waiting > 0)
        for number in range(8):  # at temperature 2, half of the answers would be yes
            body = orjson.dumps(chat(f"{number}: yes or no?", temperature=2.0))
            response = await stack.send(stack.proxy + CHAT, body, JSON)
            assert response.json["choices"][0]["message"]["content"] == "no."
        await first
        rows = await settled(stack, tmp_path, 9)
    assert [row[1] for row in rows[1:]] == ["siblings_in_flight: 0 of 3 fit"] * 8
    assert groups(tmp_path) == rows
