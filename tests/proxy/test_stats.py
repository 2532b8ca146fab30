"""Our own routes: what the proxy says of itself, and the keys it gives out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from fastapi import FastAPI

from fakevllm.config import load
from fakevllm.proxy import Proxy, open_proxy
from fakevllm.routes import groups
from fakevllm_adapters.swarm import Task
from tests.proxy.odd_swarm import OddSwarm

TASKS = {"tasks": [{"task_id": "t1", "main_query": "hi"}]}


@asynccontextmanager
async def asked(
    folder: Path, **proxy_flags: Path
) -> AsyncGenerator[tuple[Proxy, httpx.AsyncClient]]:
    async with OddSwarm() as swarm:
        flags = {"proxy": {"run_dir": folder, **proxy_flags}, "swarm": {"url": swarm.url}}
        async with open_proxy(load(None, flags)) as proxy:
            app = FastAPI()
            app.include_router(groups.router(proxy))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
                yield proxy, client


async def test_writes_the_ledger_gave_up_are_shown(tmp_path: Path) -> None:
    async with asked(tmp_path) as (proxy, client):
        stats = (await client.get("/fakevllm/stats")).json()
        assert (stats["ledger_dropped"], stats["ledger_error"]) == (0, None)
        proxy.ledger.put_tasks([Task(task_id="t", metadata={"bad": object()})])
        assert await proxy.ledger.flush()
        stats = (await client.get("/fakevllm/stats")).json()
        assert stats["ledger_dropped"] == 1 and "not JSON serializable" in stats["ledger_error"]


async def test_an_open_proxy_gives_plain_task_keys_and_a_guarded_one_signed_ones(
    tmp_path: Path,
) -> None:
    async with asked(tmp_path) as (proxy, client):
        answer = await client.post("/fakevllm/tasks", json=TASKS)
        assert answer.json() == {"keys": ["sk-task-t1"]}
    key_file = tmp_path / "keys"
    key_file.write_text("sk-one\n")
    given: set[str] = set()
    for _ in range(2):  # the same after a restart
        async with asked(tmp_path, key_file=key_file) as (proxy, client):
            (key,) = (await client.post("/fakevllm/tasks", json=TASKS)).json()["keys"]
            assert proxy.tasks.knows(key) and not proxy.tasks.knows("sk-task-t1")
            given.add(key)
    assert len(given) == 1 and given.pop().startswith("sk-task-t1.")
