"""Small routes of the engine at the proxy while the engine boots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from fakevllm.config.model import load
from fakevllm.web.proxy_components import open_proxy
from fakevllm.web.routes import passthrough
from fakevllm_adapters.protocol.errors import unavailable
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply
from tests.proxy.scripted_swarm import ROLLING, TIMEOUT_S, ScriptedSwarm, until

NOT_READY = unavailable("The engine is not ready: ENGINE.BOOTING.").body
MODELS = {"object": "list", "data": [{"id": "fake"}]}
SMALL_ROUTES = {"/v1/models": MODELS, "/version": {"version": "0.27"}, "/tokenize": {"count": 1}}


@asynccontextmanager
async def proxy_of(swarm: ScriptedSwarm, folder: Path, **upstream: Any) -> AsyncGenerator[Any]:
    flags: dict[str, Any] = {"proxy": {"run_dir": folder}, "swarm": {"url": swarm.url}}
    flags |= {"models": {"aliases": ["gpt"]}, "upstream": upstream}
    async with open_proxy(load(None, flags)) as proxy:
        app = FastAPI()
        app.include_router(passthrough.router(proxy))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            yield client


@pytest.fixture
async def booting() -> AsyncGenerator[ScriptedSwarm]:
    """A server whose engine boots for the first time."""
    async with ScriptedSwarm() as swarm:
        swarm.answers["/get_engine_status"] = EngineStatusReply(engine_status=EngineStatus.BOOTING)
        for path in (*SMALL_ROUTES, "/metrics", "/ping", "/load"):
            swarm.answers[path], swarm.statuses[path] = NOT_READY, 503
        yield swarm


def finish_boot(swarm: ScriptedSwarm) -> None:
    swarm.statuses.clear()
    swarm.answers |= SMALL_ROUTES | {"/get_engine_status": ROLLING}


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/tokenize"])
async def test_a_request_for_a_small_route_waits_while_the_engine_boots(
    path: str, booting: ScriptedSwarm, tmp_path: Path
) -> None:
    async with proxy_of(booting, tmp_path) as client:
        body = {"model": "fake", "prompt": "hi"} if path == "/tokenize" else None
        method = "POST" if body else "GET"
        request = asyncio.ensure_future(client.request(method, path, json=body))
        await until(lambda: booting.calls[path] >= 1)
        finish_boot(booting)
        response = await request
    assert response.status_code == 200
    ids = [card["id"] for card in response.json().get("data", [])]
    assert ids == (["fake", "gpt"] if path == "/v1/models" else [])


async def test_a_request_under_an_alias_waits_until_the_served_model_is_known(
    booting: ScriptedSwarm, tmp_path: Path
) -> None:
    async with proxy_of(booting, tmp_path) as client:
        request = asyncio.ensure_future(client.post("/tokenize", json={"model": "gpt"}))
        await until(lambda: booting.calls["/get_engine_status"] >= 1)
        finish_boot(booting)
        assert (await request).status_code == 200
    assert booting.bodies["/tokenize"]["model"] == "fake"


@pytest.mark.parametrize(
    ("path", "status"), [("/health", 503), ("/ping", 503), ("/load", 503), ("/metrics", 200)]
)
async def test_health_and_metrics_are_answered_at_once_while_the_engine_boots(
    path: str, status: int, booting: ScriptedSwarm, tmp_path: Path
) -> None:
    async with proxy_of(booting, tmp_path, hold_s=3600) as client:
        assert (await client.get(path)).status_code == status
    assert booting.calls[path] <= 1


async def test_the_wait_ends_with_hold_s_and_with_half_the_clients_timeout(
    booting: ScriptedSwarm, tmp_path: Path
) -> None:
    async with proxy_of(booting, tmp_path / "a", hold_s=0) as client:
        response = await client.get("/v1/models")
        assert response.status_code == 503 and response.headers["retry-after"] == "2"
        assert response.json() == NOT_READY
    async with proxy_of(booting, tmp_path / "b", hold_s=3600) as client:
        headers = {"x-stainless-read-timeout": "0.02"}
        response = await client.get("/v1/models", headers=headers)
        assert response.status_code == 503


async def test_a_stopped_engine_is_not_waited_for(booting: ScriptedSwarm, tmp_path: Path) -> None:
    booting.answers["/get_engine_status"] = EngineStatusReply(
        engine_status=EngineStatus.OFFLINE, engine_status_detail="no GPU", server_id="s"
    )
    for path in ("/sync_train_config", "/start_engine"):
        booting.answers[path] = {"success": True}
    async with proxy_of(booting, tmp_path, hold_s=3600) as client, asyncio.timeout(TIMEOUT_S):
        assert (await client.get("/version")).status_code == 503
