"""The latest answered call, as an admin is told of it."""

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
from fakevllm_server.web.latest_call import MAX_BYTES, LatestCall

JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


def answering(status: int, answer: bytes) -> AsgiApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)
        await send_bytes(send, status, answer, JSON)

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


async def called(
    latest: LatestCall, app: AsgiApp, body: bytes = b'{"a": 1}', name: str = "chat"
) -> list[MutableMapping[str, Any]]:
    """What the client got."""
    parts = [
        {"type": "http.request", "body": body[:3], "more_body": True},
        {"type": "http.request", "body": body[3:], "more_body": False},
    ]
    got: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return parts.pop(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        got.append(message)

    await latest.watching(app, name)({"type": "http"}, receive, send)
    return got


def told(latest: LatestCall) -> Any:
    found = latest.as_json()
    return None if found is None else orjson.loads(found)


async def test_before_the_first_there_is_none() -> None:
    assert LatestCall().as_json() is None


async def test_what_was_asked_and_answered_is_told_and_the_client_gets_it_as_it_is() -> None:
    latest = LatestCall()
    got = await called(latest, answering(200, b'{"b": 2}'))
    assert got[1]["body"] == b'{"b": 2}'
    assert told(latest) == {"input": {"a": 1}, "output": {"b": 2}}


@pytest.mark.parametrize("name", ["completions", "responses", "messages"])
async def test_other_formats_are_named(name: str) -> None:
    latest = LatestCall()
    await called(latest, answering(200, b"{}"), name=name)
    assert told(latest)["format"] == name


async def test_a_stream_is_told_as_its_events() -> None:
    latest = LatestCall()
    await called(latest, streams)
    assert told(latest)["output"] == [{"n": 1}, {"n": 2}]


async def test_only_an_answer_that_was_given_to_its_end_replaces_the_one_before() -> None:
    latest = LatestCall()
    await called(latest, answering(200, b'"first"'))
    await called(latest, answering(404, b'"refused"'))
    await called(latest, breaks_off)
    assert told(latest)["output"] == "first"
    await called(latest, answering(200, b'"second"'))
    assert told(latest)["output"] == "second"


@pytest.mark.parametrize("raw", [b"{", b"NaN", b"\xff", b'"\xed\xa0\x80"'])
async def test_what_is_no_json_is_told_as_text(raw: bytes) -> None:
    latest = LatestCall()
    await called(latest, answering(200, raw), raw)
    assert told(latest) == {"input": raw.decode(errors="replace")} | {
        "output": raw.decode(errors="replace")
    }


async def test_an_empty_answer_is_told_as_such() -> None:
    latest = LatestCall()
    await called(latest, answering(200, b""))
    assert told(latest)["output"] == ""


async def test_deep_nesting_is_told_as_it_came() -> None:
    """Deeper than orjson writes."""
    latest = LatestCall()
    deep = b"[" * 900 + b"]" * 900
    await called(latest, answering(200, deep), deep)
    assert latest.as_json() == b'{"input":' + deep + b',"output":' + deep + b"}"


async def test_parts_beyond_the_bound_are_told_as_their_size_and_take_no_memory() -> None:
    latest = LatestCall()
    just = orjson.dumps("x" * (MAX_BYTES - 2))
    await called(latest, answering(200, just + b" "), just)
    answer = told(latest)
    assert len(answer["input"]) == MAX_BYTES - 2
    assert answer["output"] == f"{MAX_BYTES + 1} bytes: more than the {MAX_BYTES} that are kept"


async def test_calls_that_overlap_do_not_mix() -> None:
    latest = LatestCall()
    go = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        await go.wait()
        await send_json(send, 200, body.decode())

    first = asyncio.create_task(called(latest, slow, b"first"))
    await asyncio.sleep(0)
    await called(latest, answering(200, b'"2"'), b'"second"')
    assert told(latest) == {"input": "second", "output": "2"}
    go.set()
    await first
    assert told(latest) == {"input": "first", "output": "first"}
