"""Requests that the engine refuses because of the proxy's own siblings, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from fakevllm.transport.fallback_server import Fallback
from fakevllm.transport.request import SiblingPlan
from fakevllm.transport.sibling_limit import SiblingLimit
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.protocol.outage_reasons import OutageReason
from tests.proxy.scripted_swarm import until
from tests.proxy.transport.test_retry_handler import (
    ALL_FORMATS,
    ANSWER,
    BOTH_MODES,
    ScriptedServer,
    relay_request,
    request_for,
)

BUSY: dict[str, Any] = {"error": {"message": "Too many requests are waiting.", "code": 503}}
BOTH_STATUSES = pytest.mark.parametrize("status", [429, 503])


@BOTH_STATUSES
@BOTH_MODES
@ALL_FORMATS
async def test_a_request_refused_because_of_siblings_waits_until_a_sibling_ends(
    name: str, stream: bool, status: int
) -> None:
    sibling_limit = SiblingLimit()
    async with ScriptedServer((status, BUSY), (200, ANSWER)).running() as server:
        with sibling_limit.sampling():
            relaying = asyncio.create_task(
                relay_request(
                    server.url, request_for(name, stream=stream), 3600, sibling_limit=sibling_limit
                )
            )
            await until(lambda: len(server.requests) == 1)
        received, reason = await relaying
    assert received.status == 200 and (b"Hello." in received.body or b"Hi" in received.body)
    assert reason is None and len(server.requests) == 2
    assert server.requests[0][0] == ADAPTERS[name].upstream_path


@BOTH_STATUSES
async def test_a_request_to_the_engines_own_route_waits_for_a_sibling_too(status: int) -> None:
    sibling_limit = SiblingLimit()
    async with ScriptedServer((status, BUSY), (200, {"id": "resp_1"})).running() as server:
        with sibling_limit.sampling():
            request = request_for("responses", background=True)
            relaying = asyncio.create_task(
                relay_request(server.url, request, 3600, sibling_limit=sibling_limit)
            )
            await until(lambda: len(server.requests) == 1)
        received, _ = await relaying
    assert (received.status, received.body) == (200, b'{"id": "resp_1"}')


@BOTH_STATUSES
async def test_a_request_refused_without_siblings_at_the_engine_is_refused_at_once(
    status: int,
) -> None:
    sibling_limit = SiblingLimit()
    with sibling_limit.sampling():
        pass  # the sibling has ended before the request is sent
    async with ScriptedServer((status, BUSY)).running() as server:
        received, _ = await relay_request(
            server.url, request_for("chat"), 3600, sibling_limit=sibling_limit
        )
    assert (received.status, orjson.loads(received.body)) == (status, BUSY) and len(
        server.requests
    ) == 1


@BOTH_STATUSES
async def test_a_request_refused_for_too_long_gets_the_engines_own_error(status: int) -> None:
    sibling_limit = SiblingLimit()
    async with ScriptedServer((status, BUSY)).running() as server:
        with sibling_limit.sampling():
            received, _ = await relay_request(
                server.url, request_for("chat"), 0.2, sibling_limit=sibling_limit
            )
    assert (received.status, orjson.loads(received.body)) == (status, BUSY) and len(
        server.requests
    ) > 1
    assert received.headers[b"retry-after"] == b"2"


@BOTH_STATUSES
async def test_a_request_refused_for_too_long_goes_to_the_fallback(status: int) -> None:
    sibling_limit = SiblingLimit()
    async with (
        ScriptedServer((status, BUSY)).running() as server,
        ScriptedServer((200, ANSWER)).running() as other,
    ):
        with sibling_limit.sampling():
            fallback = Fallback(other.url, None, None)
            received, reason = await relay_request(
                server.url, request_for("chat"), 0.0, fallback, sibling_limit
            )
    assert (received.status, reason) == (200, OutageReason.ENGINE_BUSY)


async def test_a_refused_request_lowers_the_limit_of_siblings() -> None:
    sibling_limit = SiblingLimit()
    async with ScriptedServer((429, BUSY), (200, ANSWER)).running() as server:
        with sibling_limit.sampling(), sibling_limit.sampling():
            await relay_request(server.url, request_for("chat"), 3600, sibling_limit=sibling_limit)
    assert sibling_limit.acquire(5).num == 1


async def test_a_greedy_lead_without_siblings_is_sampled_greedily_too() -> None:
    request = request_for("chat", temperature=0.7)
    async with ScriptedServer((200, ANSWER)).running() as server:
        await relay_request(server.url, request, plan=SiblingPlan(1, is_greedy=True))
        await relay_request(server.url, request)
    assert [body["temperature"] for _, body, _ in server.requests] == [0, 0.7]
    assert not any(
        "sibling" in name.lower() for _, _, headers in server.requests for name in headers
    )
