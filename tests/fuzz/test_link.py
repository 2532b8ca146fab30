"""Whatever a swarm server says of itself: the proxy's own routes answer, and its log has no
traceback."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings

from fakevllm.ledger.store import Ledger
from fakevllm.swarm.link import SwarmLink
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import LogEntry, LogReply, TrainedGroup
from tests.fuzz.garble import garbled
from tests.fuzz.odd_upstream import STATUS, OddUpstream, http
from tests.fuzz.rig import no_traceback, proxy_over

ENTRY = LogEntry(seq=1, kind="step", groups=[TrainedGroup(group_id="g", siblings=[0])])
SAID: dict[bytes, object] = {
    b"/get_engine_status": STATUS.model_dump(mode="json") | {"backlog": 0.5, "max_model_len": 9},
    b"/get_train_config": TrainJob().model_dump(mode="json"),
    b"/get_run_log": LogReply(entries=[ENTRY]).model_dump(mode="json"),
}


@pytest.mark.parametrize("path", SAID)
def test_a_garbled_word_of_the_server_is_outlived_without_a_traceback(
    loop: asyncio.Runner, tmp_path: Path, path: bytes
) -> None:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")

    async def follow(raw: bytes) -> None:
        async with OddUpstream().listening() as upstream:
            upstream.known[path] = http(raw)
            link = SwarmLink(upstream.url, None, TrainJob(), ledger)
            following = asyncio.create_task(link.run())
            while upstream.num_asked < 3 and not link.reached.is_set():
                await asyncio.sleep(0.001)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await link.close()

    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(garbled(SAID[path]))
    def each(raw: bytes) -> None:
        with no_traceback():
            loop.run(follow(raw))

    each()
    ledger.close()


@pytest.mark.parametrize("backlog", ["NaN", "Infinity", "1e999", "-1"])
@pytest.mark.parametrize("model_len", ["null", "-5", "9" * 40])
def test_a_status_of_odd_numbers_is_told_on_or_refused(
    loop: asyncio.Runner, tmp_path: Path, backlog: str, model_len: str
) -> None:
    said = STATUS.model_dump_json().replace('"backlog":0.0', f'"backlog":{backlog}')
    said = said.replace('"max_model_len":null', f'"max_model_len":{model_len}')

    async def asked() -> list[int]:
        async with (
            OddUpstream().listening() as upstream,
            proxy_over(tmp_path, upstream.url) as url,
            aiohttp.ClientSession() as client,
        ):
            upstream.known[b"/get_engine_status"] = http(said.encode())
            heard = upstream.num_asked
            while upstream.num_asked < heard + 4:
                await asyncio.sleep(0.01)
            statuses: list[int] = []
            for path in ("/fakevllm/engine", "/fakevllm/stats", "/health"):
                async with client.get(url + path) as answer:
                    statuses.append(answer.status)
            return statuses

    with no_traceback():
        assert set(loop.run(asked())) <= {200, 503}
