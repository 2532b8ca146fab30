"""Requests that our siblings keep from the engine, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from fakevllm.transport.fallback import Fallback
from fakevllm.transport.request import SiblingPlan
from fakevllm.transport.sibling_limit import SiblingLimit
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.protocol.reasons import OutageReason
from tests.proxy.scripted_swarm import until
from tests.proxy.transport.test_retry import (
    ALL_FORMATS,
    ANSWER,
    BOTH_MODES,
    ScriptedServer,
    relay_request,
    request_for,
)

BUSY: dict[str, Any] = {"error": {"message": "Too many requests are waiting.", "code": 503}}
FULL = pytest.mark.parametrize("status", [429, 503])


@FULL
@BOTH_MODES
@ALL_FORMATS
async def test_who_is_kept_out_by_siblings_of_ours_waits_for_one_of_them(
    name: str, stream: bool, status: int
) -> None:
    sibling_limit = SiblingLimit()
    async with ScriptedServer((status, BUSY), (200, ANSWER)).running() as server:
        with sibling_limit.sampling():
            asking = asyncio.create_task(
                relay_request(
                    server.url, request_for(name, stream=stream), 3600, sibling_limit=sibling_limit
                )
            )
            await until(lambda: len(server.requests) == 1)
        got, trouble = await asking
    assert got.status == 200 and (b"Hello." in got.body or b"Hi" in got.body)
    assert trouble is None and len(server.requests) == 2
    assert server.requests[0][0] == ADAPTERS[name].upstream_path


@FULL
async def test_a_request_of_the_engines_own_route_waits_for_them_too(status: int) -> None:
    sibling_limit = SiblingLimit()
    async with ScriptedServer((status, BUSY), (200, {"id": "resp_1"})).running() as server:
        with sibling_limit.sampling():
            request = request_for("responses", background=True)
            asking = asyncio.create_task(
                relay_request(server.url, request, 3600, sibling_limit=sibling_limit)
            )
            await until(lambda: len(server.requests) == 1)
        got, _ = await asking
    assert (got.status, got.body) == (200, b'{"id": "resp_1"}')


@FULL
async def test_who_is_kept_out_by_others_is_told_so_at_once(status: int) -> None:
    sibling_limit = SiblingLimit()
    with sibling_limit.sampling():
        pass  # it has gone before anybody asked
    async with ScriptedServer((status, BUSY)).running() as server:
        got, _ = await relay_request(
            server.url, request_for("chat"), 3600, sibling_limit=sibling_limit
        )
    assert (got.status, orjson.loads(got.body)) == (status, BUSY) and len(server.requests) == 1


@FULL
async def test_who_is_kept_out_for_too_long_is_told_so_in_the_engines_words(status: int) -> None:
    sibling_limit = SiblingLimit()
    async with ScriptedServer((status, BUSY)).running() as server:
        with sibling_limit.sampling():
            got, _ = await relay_request(
                server.url, request_for("chat"), 0.2, sibling_limit=sibling_limit
            )
    assert (got.status, orjson.loads(got.body)) == (status, BUSY) and len(server.requests) > 1
    assert got.headers[b"retry-after"] == b"2"


@FULL
async def test_who_is_kept_out_for_too_long_goes_to_the_fallback(status: int) -> None:
    sibling_limit = SiblingLimit()
    async with (
        ScriptedServer((status, BUSY)).running() as server,
        ScriptedServer((200, ANSWER)).running() as other,
    ):
        with sibling_limit.sampling():
            fallback = Fallback(other.url, None, None)
            got, trouble = await relay_request(
                server.url, request_for("chat"), 0.0, fallback, sibling_limit
            )
    assert (got.status, trouble) == (200, OutageReason.ENGINE_BUSY)


async def test_what_the_engine_would_not_take_beside_so_many_siblings_bounds_them() -> None:
    sibling_limit = SiblingLimit()
    async with ScriptedServer((429, BUSY), (200, ANSWER)).running() as server:
        with sibling_limit.sampling(), sibling_limit.sampling():
            await relay_request(server.url, request_for("chat"), 3600, sibling_limit=sibling_limit)
    assert sibling_limit.acquire(5).num == 1


async def test_a_lead_that_is_asked_alone_is_as_greedy_as_among_its_siblings() -> None:
    request = request_for("chat", temperature=0.7)
    async with ScriptedServer((200, ANSWER)).running() as server:
        await relay_request(server.url, request, plan=SiblingPlan(1, is_greedy=True))
        await relay_request(server.url, request)
    assert [body["temperature"] for _, body, _ in server.requests] == [0, 0.7]
    assert not any("sibling" in name.lower() for _, _, told in server.requests for name in told)
