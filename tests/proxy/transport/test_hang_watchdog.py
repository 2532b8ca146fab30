"""Calls that a server holds without an answer: they end when the server is silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from fakevllm.swarm.server_connection import SwarmLink
from fakevllm.transport.app_response import GRACE_S, AppResponse
from fakevllm.transport.call_slots import CallSlots
from fakevllm.transport.hang_watchdog import HangWatchdog
from fakevllm.transport.retry_handler import RetryHandler, failure_reason
from fakevllm_adapters.formats.sse import DONE
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.swarm import EngineStatus
from tests.proxy.groups.group_rig import Stage, staged, text_of
from tests.proxy.transport.test_retry_handler import (
    ALL_FORMATS,
    BOOTING,
    BOTH_MODES,
    SYNCING,
    HangingClient,
    ReceivedResponse,
    link_at,
    request_for,
)

HOLD_S = 0.2
TEST_TIMEOUT_S = 20.0


@asynccontextmanager
async def silent_link(folder: Path) -> AsyncGenerator[SwarmLink]:
    async with link_at(folder, BOOTING) as link:
        link.status, link.is_silent = None, True
        yield link


async def relay_held_request(
    link: SwarmLink, name: str, hold_s: float, *, stream: bool
) -> tuple[ReceivedResponse, str]:
    """Relay a request to a server that never answers. Return the app's response and the ledger's
    reason."""
    upstream, request, received, reason = (
        HangingClient(),
        request_for(name, stream=stream),
        ReceivedResponse(),
        "",
    )
    async with AppResponse(received, request.adapter, request.exchange) as app:
        try:
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await RetryHandler(upstream, link, hold_s).relay(request, app)
        except WireError as error:
            reason = failure_reason(error)
            await app.refuse(error)
    await upstream.close()
    assert upstream.is_called.is_set()
    return received, reason


@BOTH_MODES
@ALL_FORMATS
async def test_a_request_held_by_a_silent_server_ends_in_a_503(
    tmp_path: Path, name: str, stream: bool
) -> None:
    async with silent_link(tmp_path) as link:
        received, reason = await relay_held_request(link, name, HOLD_S, stream=stream)
    assert (received.status, received.headers[b"retry-after"], reason) == (
        503,
        b"2",
        "upstream_unreachable",
    )
    assert b"cannot be reached" in received.body


async def test_after_the_first_keep_alive_the_request_ends_in_an_error_inside_the_stream(
    tmp_path: Path,
) -> None:
    async with silent_link(tmp_path) as link:
        received, _ = await relay_held_request(link, "chat", GRACE_S + 1, stream=True)
    assert (
        received.status == 200
        and b"cannot be reached" in received.body
        and received.body.endswith(DONE)
    )


@pytest.mark.parametrize("state", [BOOTING, SYNCING])
async def test_a_request_held_by_a_responsive_server_is_not_ended(
    tmp_path: Path, state: EngineStatus
) -> None:
    upstream, request = HangingClient(), request_for("chat")
    async with (
        link_at(tmp_path, state) as link,
        AppResponse(ReceivedResponse(), request.adapter, request.exchange) as app,
    ):
        with pytest.raises(TimeoutError):  # the request would wait without end
            async with asyncio.timeout(1.2):
                await RetryHandler(upstream, link, 0.0).relay(request, app)
    await upstream.close()


async def test_a_call_whose_answer_arrives_is_not_ended_although_the_link_is_silent(
    tmp_path: Path,
) -> None:
    request, received = request_for("chat", stream=True), ReceivedResponse()
    async with (
        silent_link(tmp_path) as link,
        AppResponse(received, request.adapter, request.exchange) as app,
        HangWatchdog(link, app, HOLD_S, has_fallback=False),
    ):
        await app.open([])
        for _ in range(16):
            await app.write(b"x")
            await asyncio.sleep(0.1)
    assert received.body == b"x" * 16


async def ended(stage: Stage) -> None:
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await stage.handler
        await stage.run.wait_closed()


@BOTH_MODES
async def test_a_group_held_by_a_silent_server_ends_and_its_app_gets_a_503(
    tmp_path: Path, stream: bool
) -> None:
    async with (
        silent_link(tmp_path) as link,
        staged(2, streamed=stream, hold_s=HOLD_S, link=link) as stage,
    ):
        await ended(stage)
        assert sorted(stage.upstream.ended) == [0, 1]
    assert stage.sent[0]["status"] == 503
    assert orjson.loads(stage.body)["error"]["code"] == 503
    assert (stage.record.state, stage.record.reason) == ("failed", "upstream_unreachable")


async def test_a_stream_that_stalls_ends_when_its_server_is_silent(tmp_path: Path) -> None:
    async with (
        silent_link(tmp_path) as link,
        staged(2, streamed=True, policy="lead", hold_s=HOLD_S, link=link) as stage,
    ):
        await stage.act(0, "begins")
        await ended(stage)
        assert sorted(stage.upstream.ended) == [0, 1]
    assert text_of(0).encode() in stage.body and b"cannot be reached" in stage.body
    assert stage.is_answered and stage.record.reason == "upstream_unreachable"


async def test_siblings_that_outlive_the_answer_end_when_their_server_is_silent(
    tmp_path: Path,
) -> None:
    async with (
        silent_link(tmp_path) as link,
        staged(2, streamed=True, policy="lead", hold_s=HOLD_S, link=link) as stage,
    ):
        await stage.act(0, "answers")
        assert stage.is_answered and not stage.records
        await ended(stage)
        record = stage.record
    assert (record.state, record.reason, record.served_index) == ("dropped", "no_group", 0)


async def test_a_request_that_waits_for_a_slot_is_held_no_longer_than_one_with_a_slot(
    tmp_path: Path,
) -> None:
    slots, upstream, request = CallSlots(1), HangingClient(), request_for("chat")
    async with (
        silent_link(tmp_path) as link,
        slots.slot(is_lead=True),  # of a call that hangs
        AppResponse(ReceivedResponse(), request.adapter, request.exchange) as app,
    ):
        handler = RetryHandler(upstream, link, HOLD_S, slots=slots)
        with pytest.raises(WireError) as error:
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await handler.relay(request, app)
    await upstream.close()
    assert error.value.status == 503 and not upstream.is_called.is_set()
    assert slots.num_waiting_leads == 0
