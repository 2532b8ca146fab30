"""A call that a server keeps, where no other server could answer: over when the server is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from fakevllm.swarm.link import SwarmLink
from fakevllm.transport.app_response import GRACE_S, AppResponse
from fakevllm.transport.hang_watchdog import HangWatchdog
from fakevllm.transport.retry import RetryHandler, failure_reason
from fakevllm_adapters.formats.sse import DONE
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.swarm import EngineStatus
from tests.proxy.groups.group_rig import Stage, staged, text_of
from tests.proxy.transport.test_retry import (
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
IN_VAIN_S = 20.0


@asynccontextmanager
async def silent_link(folder: Path) -> AsyncGenerator[SwarmLink]:
    async with link_at(folder, BOOTING) as link:
        link.status, link.is_silent = None, True
        yield link


async def asked(
    link: SwarmLink, name: str, hold_s: float, *, stream: bool
) -> tuple[ReceivedResponse, str]:
    """What the app got of a server that keeps its request, and the ledger's reason."""
    upstream, request, got, why = (
        HangingClient(),
        request_for(name, stream=stream),
        ReceivedResponse(),
        "",
    )
    async with AppResponse(got, request.adapter, request.exchange) as app:
        try:
            async with asyncio.timeout(IN_VAIN_S):
                await RetryHandler(upstream, link, hold_s).relay(request, app)
        except WireError as error:
            why = failure_reason(error)
            await app.refuse(error)
    await upstream.close()
    assert upstream.is_asked.is_set()
    return got, why


@BOTH_MODES
@ALL_FORMATS
async def test_a_request_that_a_silent_server_keeps_ends_in_a_503(
    tmp_path: Path, name: str, stream: bool
) -> None:
    async with silent_link(tmp_path) as link:
        got, why = await asked(link, name, HOLD_S, stream=stream)
    assert (got.status, got.headers[b"retry-after"], why) == (503, b"2", "upstream_unreachable")
    assert b"cannot be reached" in got.body


async def test_where_keep_alives_have_begun_it_ends_in_an_error_inside_the_stream(
    tmp_path: Path,
) -> None:
    async with silent_link(tmp_path) as link:
        got, _ = await asked(link, "chat", GRACE_S + 1, stream=True)
    assert got.status == 200 and b"cannot be reached" in got.body and got.body.endswith(DONE)


@pytest.mark.parametrize("state", [BOOTING, SYNCING])
async def test_a_server_that_is_heard_is_left_to_its_own_patience(
    tmp_path: Path, state: EngineStatus
) -> None:
    upstream, request = HangingClient(), request_for("chat")
    async with (
        link_at(tmp_path, state) as link,
        AppResponse(ReceivedResponse(), request.adapter, request.exchange) as app,
    ):
        with pytest.raises(TimeoutError):  # it would wait for ever
            async with asyncio.timeout(1.2):
                await RetryHandler(upstream, link, 0.0).relay(request, app)
    await upstream.close()


async def test_a_server_whose_answer_comes_lives_whatever_its_link_hears(tmp_path: Path) -> None:
    request, got = request_for("chat", stream=True), ReceivedResponse()
    async with (
        silent_link(tmp_path) as link,
        AppResponse(got, request.adapter, request.exchange) as app,
        HangWatchdog(link, app, HOLD_S, has_fallback=False),
    ):
        await app.open([])
        for _ in range(16):
            await app.write(b"x")
            await asyncio.sleep(0.1)
    assert got.body == b"x" * 16


async def ended(stage: Stage) -> None:
    async with asyncio.timeout(IN_VAIN_S):
        await stage.handler
        await stage.run.wait_closed()


@BOTH_MODES
async def test_a_group_that_a_silent_server_keeps_ends_and_its_app_gets_a_503(
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


async def test_a_lead_that_stops_in_its_middle_ends_with_its_server(tmp_path: Path) -> None:
    async with (
        silent_link(tmp_path) as link,
        staged(2, streamed=True, policy="lead", hold_s=HOLD_S, link=link) as stage,
    ):
        await stage.tell(0, "begins")
        await ended(stage)
        assert sorted(stage.upstream.ended) == [0, 1]
    assert text_of(0).encode() in stage.body and b"cannot be reached" in stage.body
    assert stage.is_answered and stage.record.reason == "upstream_unreachable"


async def test_siblings_behind_an_answer_end_with_their_server(tmp_path: Path) -> None:
    async with (
        silent_link(tmp_path) as link,
        staged(2, streamed=True, policy="lead", hold_s=HOLD_S, link=link) as stage,
    ):
        await stage.tell(0, "answers")
        assert stage.is_answered and not stage.records
        await ended(stage)
        record = stage.record
    assert (record.state, record.reason, record.served_index) == ("dropped", "no_group", 0)
