"""Responses that only the engine has: the proxy relays them to the key that made them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from fakevllm.config.model import load
from fakevllm.web.app import create_app
from fakevllm.web.proxy_components import open_proxy
from fakevllm_adapters.formats.sse import encode
from tests.proxy.scripted_swarm import ScriptedSwarm

PATH = "/v1/responses"
MADE = {"id": "resp_1", "object": "response", "model": "fake", "output": "a secret"}
NATIVE: dict[str, Any] = {"input": "hi", "enable_response_messages": True}
"""A request that only the engine's own route can answer."""
ALICE, BOB = "sk-alice", "sk-bob"
COMPLETION = {
    "id": "c",
    "choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}],
}


@asynccontextmanager
async def open_client(folder: Path) -> AsyncGenerator[tuple[ScriptedSwarm, httpx.AsyncClient]]:
    async with ScriptedSwarm() as swarm:
        swarm.answers[PATH] = MADE
        swarm.answers[f"{PATH}/resp_1"] = MADE
        swarm.answers[f"{PATH}/resp_1/cancel"] = MADE | {"status": "cancelled"}
        flags = {"proxy": {"run_dir": folder}, "swarm": {"url": swarm.url}}
        async with open_proxy(load(None, flags | {"upstream": {"hold_s": 0}})) as proxy:
            transport = httpx.ASGITransport(create_app(proxy))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as app:
                yield swarm, app


async def send(
    app: httpx.AsyncClient, method: str, path: str, key: str = ALICE, body: Any = None
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return await app.request(method, path, json=body, headers=headers)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_get_and_cancel_are_relayed_only_for_the_key_that_made_the_response(
    tmp_path: Path, streamed: bool
) -> None:
    async with open_client(tmp_path) as (swarm, app):
        if streamed:
            event = encode({"type": "response.created", "response": MADE})
            swarm.answers[PATH] = web.Response(body=event, content_type="text/event-stream")
        assert (
            await send(app, "POST", PATH, body=NATIVE | {"stream": streamed})
        ).status_code == 200
        path = f"{PATH}/resp_1"
        for method, own in (("GET", path), ("POST", f"{path}/cancel")):
            assert (await send(app, method, own)).json() == swarm.answers[own]
            assert (await send(app, method, own, BOB)).status_code == 404
        follow_up = NATIVE | {"previous_response_id": "resp_1"}
        assert (await send(app, "POST", PATH, BOB, follow_up)).status_code == 404
        assert [swarm.calls[own] for own in (path, f"{path}/cancel", PATH)] == [1, 1, 1]


@pytest.mark.parametrize("stored", [False, True], ids=["not stored", "stored"])
async def test_a_request_that_chooses_the_id_of_a_foreign_response_does_not_reach_the_response(
    tmp_path: Path, stored: bool
) -> None:
    async with open_client(tmp_path) as (swarm, app):
        await send(app, "POST", PATH, body=NATIVE)
        claim = NATIVE | {"request_id": "resp_1", "store": stored}
        assert (await send(app, "POST", PATH, BOB, claim)).status_code == 200
        path, num_before = f"{PATH}/resp_1", swarm.calls[PATH]
        for method, own in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
            assert (await send(app, method, own, BOB)).status_code == 404
        follow_up = NATIVE | {"previous_response_id": "resp_1"}
        assert (await send(app, "POST", PATH, BOB, follow_up)).status_code == 404
        assert (swarm.calls[path], swarm.calls[PATH]) == (0, num_before)
        assert (await send(app, "GET", path)).json() == MADE


async def test_a_translated_response_with_the_id_of_a_foreign_response_leads_not_to_the_engines(
    tmp_path: Path,
) -> None:
    async with open_client(tmp_path) as (swarm, app):
        await send(app, "POST", PATH, body=NATIVE)
        swarm.answers["/v1/chat/completions"] = COMPLETION
        claim = {"input": "hi", "request_id": "resp_1"}
        assert (await send(app, "POST", PATH, BOB, claim)).json()["id"] == "resp_1"
        swarm.answers["/v1/chat/completions"] = {"error": {"message": "too long", "code": 400}}
        swarm.statuses["/v1/chat/completions"] = 400
        follow_up = {"input": "hi", "previous_response_id": "resp_1"}
        refused = await send(app, "POST", PATH, BOB, follow_up)
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "too long")
        refused = await send(app, "POST", PATH, BOB, NATIVE | follow_up)
        assert 400 <= refused.status_code < 500
        assert swarm.calls[PATH] == 1


async def test_a_query_of_a_wrong_type_reaches_the_engine_only_for_the_key_of_a_native_response(
    tmp_path: Path,
) -> None:
    async with open_client(tmp_path) as (swarm, app):
        await send(app, "POST", PATH, body=NATIVE)
        path = f"{PATH}/resp_1"
        refused = (await send(app, "GET", f"{path}?stream=%01", BOB)).json()["error"]
        assert (refused["code"], refused["param"], swarm.calls[path]) == (400, "query.stream", 0)
        assert (await send(app, "GET", f"{path}?stream=%01")).json() == MADE
