"""Responses that only the engine has: the server relays them to the key that made them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from swarm_server.web.planned_engine import AppCall, PlannedEngine, answers_whole, start_server

from fakevllm_server.web.server_state import ServerState
from fakevllm_server.web.stored_responses import StoredResponses

Json = dict[str, Any]
PATH = "/v1/responses"
NATIVE: Json = {"input": "a secret", "enable_response_messages": True}
"""Fields of a request that only the engine's own route can answer."""
ALICE, BOB = "sk-alice", "sk-bob"


@asynccontextmanager
async def running(folder: Path) -> AsyncGenerator[tuple[ServerState, PlannedEngine]]:
    async with PlannedEngine(folder) as engine:
        state = await start_server(folder, engine)
        try:
            yield state, engine
        finally:
            await state.close()


async def call(
    state: ServerState, method: str, path: str, key: str = ALICE, query: bytes = b"", **body: Any
) -> AppCall:
    headers = {"Authorization": f"Bearer {key}"}
    return await AppCall(
        state, body, method=method, path=path, headers=headers, query=query
    ).answered()


async def make(state: ServerState, key: str = ALICE, **fields: Any) -> AppCall:
    made = await call(state, "POST", PATH, key, **NATIVE | fields)
    assert made.status == 200
    return made


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_get_and_cancel_are_relayed_only_for_the_key_that_made_the_response(
    tmp_path: Path, streamed: bool
) -> None:
    async with running(tmp_path) as (state, engine):
        await make(state, stream=streamed)
        (response_id,) = engine.responses
        path = f"{PATH}/{response_id}"
        for method, own in (("GET", path), ("POST", f"{path}/cancel")):
            reply = await call(state, method, own)
            assert (reply.status, reply.json["path"]) == (200, own)
            reply = await call(state, method, own, BOB)
            assert reply.status == 404 and response_id in reply.json["error"]["message"]
        follow_up: Json = NATIVE | {"previous_response_id": response_id}
        assert (await call(state, "POST", PATH, BOB, **follow_up)).status == 404
        assert (await call(state, "POST", PATH, **follow_up)).status == 200


@pytest.mark.parametrize("stored", [False, True], ids=["not stored", "stored"])
async def test_a_request_that_chooses_the_id_of_a_foreign_response_does_not_reach_the_response(
    tmp_path: Path, stored: bool
) -> None:
    async with running(tmp_path) as (state, engine):
        await make(state)
        (response_id,) = engine.responses
        claim = await make(state, BOB, request_id=response_id, store=stored, input="mine")
        assert claim.json["id"] == response_id
        path = f"{PATH}/{response_id}"
        for method, own in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
            assert (await call(state, method, own, BOB)).status == 404
        follow_up: Json = NATIVE | {"previous_response_id": response_id}
        assert (await call(state, "POST", PATH, BOB, **follow_up)).status == 404
        assert (await call(state, "GET", path)).status == 200


async def test_a_deleted_native_response_cannot_be_retrieved(tmp_path: Path) -> None:
    async with running(tmp_path) as (state, _):
        path = f"{PATH}/{(await make(state)).json['id']}"
        assert (await call(state, "DELETE", path)).json["deleted"]
        assert (await call(state, "GET", path)).status == 404


async def test_a_query_of_a_wrong_type_reaches_the_engine_only_for_the_key_of_a_native_response(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (state, _):
        path, query = f"{PATH}/{(await make(state)).json['id']}", b"starting_after=x"
        assert (await call(state, "GET", path, query=query)).json[
            "path"
        ] == f"{path}?{query.decode()}"
        error = (await call(state, "GET", path, BOB, query)).json["error"]
        assert (error["code"], error["param"]) == (400, "query.starting_after")


async def test_a_response_whose_id_is_no_word_is_retrieved_and_deleted(tmp_path: Path) -> None:
    async with running(tmp_path) as (state, engine):
        engine.plans.append(answers_whole)
        made = await call(state, "POST", PATH, input="hi", request_id="a.b")
        assert made.json["id"] == "a.b"
        assert (await call(state, "GET", f"{PATH}/a.b")).json == made.json
        assert (await call(state, "DELETE", f"{PATH}/a.b")).json["deleted"]
        assert (await call(state, "GET", f"{PATH}/a.b")).status == 404


def test_the_size_of_stored_responses_includes_their_ids() -> None:
    stored = StoredResponses(max_bytes=500)
    ids = [f"{number:0200}" for number in range(3)]
    for response_id in ids:
        stored.store("key", response_id, None)
    assert [stored.has("key", response_id) for response_id in ids] == [False, True, True]
    stored.delete("key", ids[1])
    stored.store("key", ids[0], b"{}")
    assert stored.has("key", ids[0]) and stored.has("key", ids[2])


def test_a_response_whose_id_is_too_long_is_not_stored() -> None:
    stored = StoredResponses()
    for num_chars in (256, 257):
        stored.store("key", "x" * num_chars, b"{}")
    assert stored.has("key", "x" * 256) and not stored.has("key", "x" * 257)
