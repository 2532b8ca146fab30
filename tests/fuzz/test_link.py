"""Garbled status, job and run log of a swarm server: the proxy's own routes answer, and its log has
no traceback."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings

from fakevllm.ledger.store import Ledger
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import LogEntry, LogReply, TrainedGroup
from tests.fuzz.garble import garbled
from tests.fuzz.in_process_stack import no_traceback, proxy_over
from tests.fuzz.odd_upstream import STATUS, OddUpstream, http

ENTRY = LogEntry(seq=1, kind="step", groups=[TrainedGroup(group_id="g", siblings=[0])])
REPLIES: dict[bytes, object] = {
    b"/get_engine_status": STATUS.model_dump(mode="json") | {"backlog": 0.5, "max_model_len": 9},
    b"/get_train_config": TrainJob().model_dump(mode="json"),
    b"/get_run_log": LogReply(entries=[ENTRY]).model_dump(mode="json"),
}


@pytest.mark.parametrize("path", REPLIES)
def test_a_garbled_reply_of_the_server_causes_no_traceback(
    loop: asyncio.Runner, tmp_path: Path, path: bytes
) -> None:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")

    async def follow(raw: bytes) -> None:
        async with OddUpstream().listening() as upstream:
            upstream.valid[path] = http(raw)
            link = SwarmLink(upstream.url, None, TrainJob(), ledger)
            following = asyncio.create_task(link.run())
            while upstream.num_requests < 3 and not link.reached.is_set():
                await asyncio.sleep(0.001)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await link.close()

    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(garbled(REPLIES[path]))
    def each(raw: bytes) -> None:
        with no_traceback():
            loop.run(follow(raw))

    each()
    ledger.close()


@pytest.mark.parametrize("backlog", ["NaN", "Infinity", "1e999", "-1"])
@pytest.mark.parametrize("model_len", ["null", "-5", "9" * 40])
def test_a_status_with_odd_numbers_is_passed_on_or_refused(
    loop: asyncio.Runner, tmp_path: Path, backlog: str, model_len: str
) -> None:
    status = STATUS.model_dump_json().replace('"backlog":0.0', f'"backlog":{backlog}')
    status = status.replace('"max_model_len":null', f'"max_model_len":{model_len}')

    async def get_statuses() -> list[int]:
        async with (
            OddUpstream().listening() as upstream,
            proxy_over(tmp_path, upstream.url) as url,
            aiohttp.ClientSession() as client,
        ):
            upstream.valid[b"/get_engine_status"] = http(status.encode())
            num_before = upstream.num_requests
            while upstream.num_requests < num_before + 4:
                await asyncio.sleep(0.01)
            statuses: list[int] = []
            for path in ("/fakevllm/engine", "/fakevllm/stats", "/health"):
                async with client.get(url + path) as answer:
                    statuses.append(answer.status)
            return statuses

    with no_traceback():
        assert set(loop.run(get_statuses())) <= {200, 503}
