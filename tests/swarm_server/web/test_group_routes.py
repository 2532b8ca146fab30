"""The replies to the ends of groups: which of them name the run and the job."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest_asyncio
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.separate_prompts import ASKED, PROMPTS_HEADER, parse_sizes
from fakevllm_adapters.protocol.swarm import EndGroupReply, SiblingRef
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.web.app import create_app
from fakevllm_server.web.server_state import ServerState
from tests.swarm_server.journal.disk_faults import BlockedWriter


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncGenerator[tuple[ServerState, httpx.AsyncClient]]:
    """The state of a server whose engine was started once and is off, and a client."""
    app = create_app(ServerConfig("fake", tmp_path))
    state: ServerState = app.state.server
    await start_and_stop(state, "a")
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield state, http
    await state.close()


async def start_and_stop(state: ServerState, experiment: str) -> None:
    state.job = TrainJob(experiment_name=experiment, num_repeat=2)
    async with state.engine_lock:
        await state.start_engine()
    await state.stop_engine()


END = {"group_id": "g", "rewards": [1.0, 0.0]}


async def capture(state: ServerState) -> None:
    for index in range(2):
        await state.intake.add_call(SiblingRef("g", index), call())


async def test_the_reply_to_a_refused_end_names_no_run_and_no_job(
    server: tuple[ServerState, httpx.AsyncClient],
) -> None:
    _, http = server
    reply = (await http.post("/end_group", json=END)).json()
    assert (reply["success"], reply["run_id"], reply["job_hash"]) == (False, "", "")


async def test_an_accepted_end_names_the_run_that_got_the_group_also_when_it_is_sent_again(
    server: tuple[ServerState, httpx.AsyncClient],
) -> None:
    state, http = server
    await capture(state)
    first, second = [(await http.post("/end_group", json=END)).json() for _ in range(2)]
    assert first["success"] and first["run_id"] == state.run_id and first["job_hash"]
    assert (second["run_id"], second["job_hash"]) == (first["run_id"], first["job_hash"])


async def test_an_end_that_is_written_during_a_change_of_the_run_names_the_run_that_got_it(
    server: tuple[ServerState, httpx.AsyncClient],
) -> None:
    state, http = server
    await capture(state)
    run_id = state.run_id
    writer = BlockedWriter(state.journal)
    end = asyncio.create_task(http.post("/end_group", json=END))
    await asyncio.wait([end], timeout=0.2)
    change = asyncio.create_task(start_and_stop(state, "b"))
    async with asyncio.timeout(20):
        while state.run_id == run_id:
            await asyncio.sleep(0.01)
        writer.release()
        reply = (await end).json()
        await change
    assert reply["success"] and reply["run_id"] == run_id


async def test_the_reply_has_each_prompt_once_and_apart_if_the_proxy_asks_for_it(
    server: tuple[ServerState, httpx.AsyncClient],
) -> None:
    state, http = server
    await capture(state)
    response = await http.post("/end_group", json=END, headers={PROMPTS_HEADER: ASKED})
    short = EndGroupReply.from_response(
        response.content, parse_sizes(response.headers[PROMPTS_HEADER])
    )
    assert [[one.prompt for one in own] for own in short.calls] == [[0], [0]]
    again = (await http.post("/end_group", json=END)).json()
    for own in again["calls"]:
        assert [b64decode(one["prompt_ids"]) for one in own] == short.prompts
