"""Relay of one answer: the body of a refusal, and the beginning and end of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest
from aiohttp import web

from fakevllm.release.arms import Arm
from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.engine_client import EngineClient, EngineResponse, LiveResponse
from fakevllm.transport.relay import relay
from fakevllm.transport.request import Request, SiblingResult, with_app_id
from fakevllm.transport.request_arm import RequestArm
from fakevllm_adapters.formats.base import Answer, EngineInfo, NotTranslated
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.formats.sse import DONE, encode
from fakevllm_adapters.protocol.errors import WireError, bad_request, internal_error

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
MESSAGES = {"model": "m", "max_tokens": 9, "messages": [USER]}
ROLE = encode({"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant"}}]})
DELTA: dict[str, Any] = {}
END = encode({"id": "c", "choices": [{"index": 0, "delta": DELTA, "finish_reason": "stop"}]})


class AnsweringServer:
    """A server that answers each path with a status and a body; a list of chunks is a stream."""

    def __init__(self, answers: dict[str, tuple[int, bytes | list[bytes]]]) -> None:
        self.answers = answers
        self.requests: list[tuple[str, bytes]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.path, await request.read()))
        status, body = self.answers[request.path]
        if isinstance(body, bytes):
            return web.Response(status=status, body=body, content_type="application/json")
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for chunk in body:
            await stream.write(chunk)
        return stream


@asynccontextmanager
async def client_for(server: AnsweringServer) -> AsyncGenerator[EngineClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    upstream = EngineClient(f"http://{host}:{port}", None)
    try:
        yield upstream
    finally:
        await upstream.close()
        await runner.cleanup()


def request(name: str, body: dict[str, Any]) -> Request:
    adapter = ADAPTERS[name]
    raw = orjson.dumps(body)
    try:
        exchange = adapter.open(body, EngineInfo("m", 4096, None))
    except NotTranslated as error:
        return Request("r", adapter, raw, raw, None, {}, str(error))
    upstream_body = raw if name == "chat" else orjson.dumps(exchange.body)
    return Request("r", adapter, raw, upstream_body, exchange, {})


class ChunkClient(EngineClient):
    """A client that returns its chunks one by one as a stream, for any request."""

    def __init__(self, chunks: list[bytes]) -> None:
        super().__init__("http://127.0.0.1:9", None)
        self._chunks = chunks

    @asynccontextmanager
    async def live(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[LiveResponse]:
        yield LiveResponse(200, [], True, self._stream())

    async def _stream(self) -> AsyncGenerator[bytes]:
        for chunk in self._chunks:
            yield chunk


class ReceivedResponse:
    """The response as the app receives it."""

    def __init__(self) -> None:
        self.status = 0
        self.is_ended = False
        self.body = b""

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")
        self.is_ended = not message.get("more_body", message["type"] == "http.response.start")


async def relay_request(server: AnsweringServer, app_request: Request) -> ReceivedResponse:
    received = ReceivedResponse()
    async with (
        client_for(server) as upstream,
        AppResponse(received, app_request.adapter, app_request.exchange) as app,
    ):
        await relay(upstream, app_request, app)
    assert received.is_ended
    return received


async def test_a_refused_translation_gets_the_refusal_of_the_engines_own_route() -> None:
    native_refusal = b'{"type":"error","error":{"type":"x","message":"as you said it"}}'
    server = AnsweringServer({CHAT: (400, b'{"error":{}}'), "/v1/messages": (400, native_refusal)})
    received = await relay_request(server, request("messages", MESSAGES))
    assert (received.status, received.body) == (400, native_refusal)
    assert server.requests[1] == ("/v1/messages", orjson.dumps(MESSAGES))


async def test_a_request_without_a_native_route_gets_the_refusal_of_its_translation() -> None:
    server = AnsweringServer({CHAT: (400, b'{"error":{"message":"no"}}')})
    app_request = replace(request("messages", MESSAGES), has_native_route=False)
    received = await relay_request(server, app_request)
    assert received.status == 400 and b'"message":"no"' in received.body
    assert len(server.requests) == 1


@pytest.mark.parametrize("policy", ["policy-0", None])
async def test_only_an_arm_whose_policy_answers_has_no_native_route(policy: str | None) -> None:
    native = b'{"id":"msg_1"}'
    server = AnsweringServer(
        {CHAT: (400, b'{"error":{"message":"no"}}'), "/v1/messages": (200, native)}
    )
    arm = RequestArm(Arm.BASELINE, 0.5, "root", policy=policy)
    received = await relay_request(server, replace(request("messages", MESSAGES), arm=arm))
    assert (received.body == native) == (policy is None)


async def test_a_stream_of_the_engines_own_route_carries_the_alias() -> None:
    event = encode({"type": "response.created", "response": {"id": "resp_1", "model": "m"}})
    middle = event.index(b'"m"') + 2
    server = AnsweringServer({"/v1/responses": (200, [event[:middle], event[middle:], DONE])})
    body = {"input": "hi", "background": True}
    received = await relay_request(server, replace(request("responses", body), alias="gpt"))
    assert received.body == event.replace(b'"m"', b'"gpt"') + DONE


async def test_a_request_that_cannot_be_translated_goes_to_the_engines_own_route() -> None:
    body = {"input": "hi", "background": True}
    server = AnsweringServer({"/v1/responses": (200, b'{"id":"resp_1"}')})
    received = await relay_request(server, request("responses", body))
    assert (received.status, received.body) == (200, b'{"id":"resp_1"}')
    assert server.requests == [("/v1/responses", orjson.dumps(body))]


async def test_an_error_of_the_server_is_sent_in_the_apps_format() -> None:
    server = AnsweringServer({CHAT: (503, orjson.dumps(internal_error().body))})
    app_request = request("messages", MESSAGES)
    received = ReceivedResponse()
    async with (
        client_for(server) as upstream,
        AppResponse(received, app_request.adapter, app_request.exchange) as app,
    ):
        with pytest.raises(WireError) as outage:
            await relay(upstream, app_request, app)
        await app.refuse(outage.value)
    assert received.status == 503 and orjson.loads(received.body)["type"] == "error"
    assert len(server.requests) == 1


async def test_a_stream_that_begins_with_a_permanent_error_becomes_a_status() -> None:
    refused = bad_request("too many logprobs").body
    server = AnsweringServer({CHAT: (200, [encode(refused), DONE])})
    received = await relay_request(server, request("chat", {"messages": [USER], "stream": True}))
    assert (received.status, orjson.loads(received.body)) == (400, refused)


async def test_a_stream_that_begins_with_a_temporary_error_is_relayed_unchanged() -> None:
    events = [encode(internal_error().body), DONE]
    server = AnsweringServer({CHAT: (200, events)})
    received = await relay_request(server, request("chat", {"messages": [USER], "stream": True}))
    assert (received.status, received.body) == (200, b"".join(events))


async def test_a_complete_stream_without_done_gets_a_done_event() -> None:
    server = AnsweringServer({CHAT: (200, [ROLE, END])})
    received = await relay_request(server, request("chat", {"messages": [USER], "stream": True}))
    assert received.body == ROLE + END + DONE


async def test_an_event_that_is_not_json_ends_the_stream_with_an_error() -> None:
    server = AnsweringServer({CHAT: (200, [ROLE, b"data: {bad\n\n", END, DONE])})
    received = await relay_request(server, request("chat", {"messages": [USER], "stream": True}))
    assert received.body == ROLE + encode(internal_error().body) + DONE


@pytest.mark.parametrize("body", [b"", b'{"id":"c","cho', b"[]", b'{"error":{"code":500}}'])
async def test_a_malformed_whole_answer_becomes_a_500(body: bytes) -> None:
    server = AnsweringServer({CHAT: (200, body)})
    received = await relay_request(server, request("chat", {"messages": [USER]}))
    assert (received.status, orjson.loads(received.body)) == (500, internal_error().body)


@pytest.mark.parametrize("events", [[], [ROLE]])
async def test_a_stream_cut_short_ends_in_an_error(events: list[bytes]) -> None:
    server = AnsweringServer({CHAT: (200, events)})
    received = await relay_request(server, request("chat", {"messages": [USER], "stream": True}))
    *_, error, done = received.body.split(b"\n\n")[:-1]
    assert error.startswith(b'data: {"error"') and done == b"data: [DONE]"


@pytest.mark.parametrize("name", ["chat", "messages", "responses"])
async def test_a_stream_that_contains_an_error_ends_in_every_format(name: str) -> None:
    upstream = ChunkClient([ROLE, encode(internal_error().body), DONE])
    body = {"messages": MESSAGES, "chat": MESSAGES, "responses": {"input": "hi"}}[name]
    app_request, received = request(name, body | {"stream": True}), ReceivedResponse()
    async with AppResponse(received, app_request.adapter, app_request.exchange) as app:
        await relay(upstream, app_request, app)
    await upstream.close()
    assert received.is_ended and b"Internal server error" in received.body


async def test_an_unreachable_server_raises_an_error_before_anything_is_sent() -> None:
    app_request = request("chat", {"messages": [USER]})
    unreachable = EngineClient("http://127.0.0.1:9", None)
    received = ReceivedResponse()
    with pytest.raises(WireError):
        async with AppResponse(received, app_request.adapter, app_request.exchange) as app:
            await relay(unreachable, app_request, app)
    await unreachable.close()
    assert not received.status


@pytest.mark.parametrize("index", [3, 5])  # 5 shares the call of 3
@pytest.mark.parametrize(
    ("headers", "body"),
    [({"X-Request-Id": "my.own"}, {}), ({}, {"request_id": "my.own"})],
)
def test_the_served_sibling_has_the_id_that_the_app_chose(
    headers: dict[str, str], body: dict[str, Any], index: int
) -> None:
    exchange = ADAPTERS["chat"].open(body, EngineInfo())
    app_request = Request("r", ADAPTERS["chat"], b"", b"", exchange, headers)
    reply = EngineResponse(200, [], b'{"id":"chatcmpl-my.own-3","model":"my.own-3"}', False, 0.0)
    relayed = with_app_id(reply, app_request, index).body
    assert relayed == b'{"id":"chatcmpl-my.own","model":"my.own-3"}'


@pytest.mark.parametrize(
    ("index", "name", "shown_id"),
    [
        (3, "chatcmpl-my.own-3", "chatcmpl-my.own"),
        (5, "chatcmpl-my.own-3", "chatcmpl-my.own"),
        (3, "chatcmpl-myXown-3", "chatcmpl-myXown-3"),
        (0, "chatcmpl-my.own-3", "chatcmpl-my.own-3"),
        (3, None, None),
    ],
)
def test_an_answer_is_known_by_the_id_that_its_app_receives(
    index: int, name: str | None, shown_id: str | None
) -> None:
    exchange = ADAPTERS["chat"].open({}, EngineInfo())
    app_request = Request("r", ADAPTERS["chat"], b"", b"", exchange, {"X-Request-Id": "my.own"})
    result = SiblingResult(index, answer=Answer({}, "stop", id=name))
    assert result.answer_id(app_request) == shown_id


def test_without_an_id_of_the_app_the_answer_is_unchanged() -> None:
    reply = EngineResponse(200, [], b'{"id":"chatcmpl-a-3"}', False, 0.0)
    assert with_app_id(reply, request("chat", {"messages": [USER]}), 3) is reply
