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


async def test_task_keys_are_signed_and_an_open_proxy_takes_plain_ones_too(
    tmp_path: Path,
) -> None:
    key_file = tmp_path / "of-apps"
    key_file.write_text("sk-one\n")
    given: set[str] = set()
    for keys in (None, key_file, key_file):  # the same after a restart
        flags = {} if keys is None else {"key_file": keys}
        async with asked(tmp_path, **flags) as (proxy, client):
            (key,) = (await client.post("/fakevllm/tasks", json=TASKS)).json()["keys"]
            assert proxy.tasks.knows(key)
            assert proxy.tasks.knows("sk-task-t1") is (keys is None)
            given.add(key)
    assert len(given) == 1 and given.pop().startswith("sk-task-t1.")
