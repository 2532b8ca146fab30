"""The record of the latest answered call, as an admin reads it."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import orjson
import pytest

from fakevllm_adapters.http.asgi import (
    AsgiApp,
    Receive,
    Scope,
    Send,
    read_body,
    send_bytes,
    send_chunk,
    send_json,
    start_stream,
)
from fakevllm_server.web.latest_call_recorder import MAX_BYTES, LatestCall

JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


def answering(status: int, body: bytes) -> AsgiApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)
        await send_bytes(send, status, body, JSON)

    return app


async def streams(scope: Scope, receive: Receive, send: Send) -> None:
    await read_body(receive)
    await start_stream(send, 200, EVENTS)
    for chunk in (b'data: {"n"', b": 1}\n\n: keep-alive\n\n", b'data: {"n": 2}\n\n'):
        await send_chunk(send, chunk)
    await send_chunk(send, b"data: [DONE]\n\n", last=True)


async def breaks_off(scope: Scope, receive: Receive, send: Send) -> None:
    await start_stream(send, 200, EVENTS)
    await send_chunk(send, b'data: {"n": 1}\n\n')


async def call(
    latest: LatestCall, app: AsgiApp, body: bytes = b'{"a": 1}', name: str = "chat"
) -> list[MutableMapping[str, Any]]:
    """Send one request through the recorded app and return the messages the client received."""
    parts = [
        {"type": "http.request", "body": body[:3], "more_body": True},
        {"type": "http.request", "body": body[3:], "more_body": False},
    ]
    received: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return parts.pop(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        received.append(message)

    await latest.record(app, name)({"type": "http"}, receive, send)
    return received


def shown(latest: LatestCall) -> Any:
    document = latest.as_json()
    return None if document is None else orjson.loads(document)


async def test_before_the_first_call_there_is_no_record() -> None:
    assert LatestCall().as_json() is None


async def test_request_and_response_are_recorded_and_reach_the_client_unchanged() -> None:
    latest = LatestCall()
    received = await call(latest, answering(200, b'{"b": 2}'))
    assert received[1]["body"] == b'{"b": 2}'
    assert shown(latest) == {"input": {"a": 1}, "output": {"b": 2}}


@pytest.mark.parametrize("name", ["completions", "responses", "messages"])
async def test_every_format_except_chat_is_named(name: str) -> None:
    latest = LatestCall()
    await call(latest, answering(200, b"{}"), name=name)
    assert shown(latest)["format"] == name


async def test_a_stream_is_shown_as_the_list_of_its_events() -> None:
    latest = LatestCall()
    await call(latest, streams)
    assert shown(latest)["output"] == [{"n": 1}, {"n": 2}]


async def test_only_a_complete_answer_with_status_200_replaces_the_record() -> None:
    latest = LatestCall()
    await call(latest, answering(200, b'"first"'))
    await call(latest, answering(404, b'"refused"'))
    await call(latest, breaks_off)
    assert shown(latest)["output"] == "first"
    await call(latest, answering(200, b'"second"'))
    assert shown(latest)["output"] == "second"


@pytest.mark.parametrize("raw", [b"{", b"NaN", b"\xff", b'"\xed\xa0\x80"'])
async def test_a_body_that_is_not_json_is_shown_as_text(raw: bytes) -> None:
    latest = LatestCall()
    await call(latest, answering(200, raw), raw)
    assert shown(latest) == {"input": raw.decode(errors="replace")} | {
        "output": raw.decode(errors="replace")
    }


async def test_an_empty_answer_is_shown_as_an_empty_text() -> None:
    latest = LatestCall()
    await call(latest, answering(200, b""))
    assert shown(latest)["output"] == ""


async def test_deeply_nested_json_is_shown_unchanged() -> None:
    """orjson reads this depth but cannot write it."""
    latest = LatestCall()
    deep = b"[" * 900 + b"]" * 900
    await call(latest, answering(200, deep), deep)
    assert latest.as_json() == b'{"input":' + deep + b',"output":' + deep + b"}"


async def test_a_body_above_the_limit_is_shown_as_its_size_alone() -> None:
    latest = LatestCall()
    largest = orjson.dumps("x" * (MAX_BYTES - 2))
    await call(latest, answering(200, largest + b" "), largest)
    record = shown(latest)
    assert len(record["input"]) == MAX_BYTES - 2
    assert record["output"] == f"{MAX_BYTES + 1} bytes: larger than the limit of {MAX_BYTES}"


async def test_overlapping_calls_are_recorded_apart() -> None:
    latest = LatestCall()
    released = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        await released.wait()
        await send_json(send, 200, body.decode())

    first = asyncio.create_task(call(latest, slow, b"first"))
    await asyncio.sleep(0)
    await call(latest, answering(200, b'"2"'), b'"second"')
    assert shown(latest) == {"input": "second", "output": "2"}
    released.set()
    await first
    assert shown(latest) == {"input": "first", "output": "first"}
