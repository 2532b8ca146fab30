"""Limits that the guard middleware enforces: headers, bodies, concurrent calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest
from fastapi import FastAPI

from fakevllm_adapters.http.access_guard import Guard, GuardMiddleware
from fakevllm_adapters.http.asgi import (
    MAX_BODY_BYTES,
    ClientDisconnected,
    Receive,
    Scope,
    Send,
    read_body,
    send_json,
)
from fakevllm_adapters.http.concurrency_limit import OpenCalls
from fakevllm_adapters.http.limits import Limits
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.keys import KeyRing
from tests.adapters.http.guarded import KEYED, client_of, echo_app


async def test_too_many_headers_are_refused_with_400_also_on_an_open_path() -> None:
    many = [("x-a", "b")] * 300
    async with client_of(GuardMiddleware(echo_app, KEYED)) as app:
        answer = await app.get("/health", headers=many)
    assert answer.status_code == 400
    assert "more than 256 headers" in answer.json()["error"]["message"]


@pytest.mark.parametrize("num_chunks", [1, 7])
async def test_a_body_is_read_up_to_the_limit_and_refused_with_413_beyond(num_chunks: int) -> None:
    async def chunks(size: int) -> AsyncGenerator[bytes]:
        for at in range(num_chunks):
            yield b"x" * (size * (at + 1) // num_chunks - size * at // num_chunks)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await echo_app(scope, receive, send)
        except WireError as error:
            await send_json(send, error.status, error.body)

    guard = Guard(limits=Limits(body_bytes=100))
    async with client_of(GuardMiddleware(app, guard)) as client:
        assert (await client.post("/v1/x", content=chunks(100))).json()["bytes"] == 100
        answer = await client.post("/v1/x", content=chunks(101))
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == "The request body is larger than 100 bytes."


async def test_a_body_that_the_framework_reads_is_limited_too() -> None:
    routes = FastAPI()

    @routes.post("/tasks")
    def tasks(body: dict[str, str]) -> int:  # pyright: ignore[reportUnusedFunction]
        return len(body)

    guard = Guard(limits=Limits(body_bytes=100))
    async with client_of(GuardMiddleware(routes, guard)) as client:  # pyright: ignore[reportArgumentType]
        assert (await client.post("/tasks", json={"a": "x"})).json() == 1
        assert (await client.post("/tasks", json={"a": "x" * 100})).status_code == 400


async def test_the_default_limit_is_that_of_vllms_rust_frontend() -> None:
    assert Limits().body_bytes == MAX_BODY_BYTES == 32 * 2**20


async def test_a_disconnect_within_the_body_raises_client_disconnected() -> None:
    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnected):
        await read_body(receive)


async def test_calls_count_while_they_are_open_and_their_slot_is_free_after_an_error() -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/broken":
            raise RuntimeError("broken")
        if scope["path"] == "/v1/slow":
            entered.set()
            await release.wait()
        await echo_app(scope, receive, send)

    guard = Guard(open_calls=OpenCalls(most=1))
    async with client_of(GuardMiddleware(app, guard)) as client:
        slow = asyncio.create_task(client.post("/v1/slow"))
        await entered.wait()
        answer = await client.post("/v1/fast")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
        assert answer.json()["error"]["type"] == "Too Many Requests"
        assert (await client.get("/v1/models")).status_code == 200
        release.set()
        assert (await slow).status_code == 200
        with pytest.raises(RuntimeError):
            await client.post("/v1/broken")
        assert guard.open_calls.num == 0
        assert (await client.post("/v1/fast")).status_code == 200


async def test_a_request_without_a_key_takes_no_slot() -> None:
    guard = Guard(KeyRing(["sk-one"]), open_calls=OpenCalls(most=1))
    async with client_of(GuardMiddleware(echo_app, guard)) as client:
        for _ in range(3):
            assert (await client.post("/v1/x")).status_code == 401
    assert guard.open_calls.num == 0
