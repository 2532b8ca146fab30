"""One answer passed on: whose words a refusal has, what a stream may begin and end with."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web

from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.engine_client import EngineClient, EngineResponse, LiveResponse
from fakevllm.transport.relay import relay
from fakevllm.transport.request import Request, SiblingResult, with_app_id
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


class Answers:
    """A server that answers each path with a status and bytes; a list is a stream."""

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
async def upstream_of(server: Answers) -> AsyncGenerator[EngineClient]:
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
    except NotTranslated as why:
        return Request("r", adapter, raw, raw, None, {}, str(why))
    asked = raw if name == "chat" else orjson.dumps(exchange.body)
    return Request("r", adapter, raw, asked, exchange, {})


class Dripping(EngineClient):
    """Streams its chunks one by one, whatever is asked."""

    def __init__(self, chunks: list[bytes]) -> None:
        super().__init__("http://127.0.0.1:9", None)
        self._chunks = chunks

    @asynccontextmanager
    async def live(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[LiveResponse]:
        yield LiveResponse(200, [], True, self._drip())

    async def _drip(self) -> AsyncGenerator[bytes]:
        for chunk in self._chunks:
            yield chunk


class ReceivedResponse:
    def __init__(self) -> None:
        self.status = 0
        self.is_ended = False
        self.body = b""

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")
        self.is_ended = not message.get("more_body", message["type"] == "http.response.start")


async def relay_request(server: Answers, asked: Request) -> ReceivedResponse:
    got = ReceivedResponse()
    async with (
        upstream_of(server) as upstream,
        AppResponse(got, asked.adapter, asked.exchange) as app,
    ):
        await relay(upstream, asked, app)
    assert got.is_ended
    return got


async def test_a_refused_translation_is_refused_in_the_engines_own_words() -> None:
    own = b'{"type":"error","error":{"type":"x","message":"as you said it"}}'
    server = Answers({CHAT: (400, b'{"error":{}}'), "/v1/messages": (400, own)})
    got = await relay_request(server, request("messages", MESSAGES))
    assert (got.status, got.body) == (400, own)
    assert server.requests[1] == ("/v1/messages", orjson.dumps(MESSAGES))


async def test_what_cannot_be_translated_goes_to_the_engines_own_route() -> None:
    body = {"input": "hi", "background": True}
    server = Answers({"/v1/responses": (200, b'{"id":"resp_1"}')})
    got = await relay_request(server, request("responses", body))
    assert (got.status, got.body) == (200, b'{"id":"resp_1"}')
    assert server.requests == [("/v1/responses", orjson.dumps(body))]


async def test_trouble_of_the_server_is_worded_in_the_apps_format() -> None:
    server = Answers({CHAT: (503, orjson.dumps(internal_error().body))})
    asked = request("messages", MESSAGES)
    got = ReceivedResponse()
    async with (
        upstream_of(server) as upstream,
        AppResponse(got, asked.adapter, asked.exchange) as app,
    ):
        with pytest.raises(WireError) as trouble:
            await relay(upstream, asked, app)
        await app.refuse(trouble.value)
    assert got.status == 503 and orjson.loads(got.body)["type"] == "error"
    assert len(server.requests) == 1


async def test_a_stream_that_begins_with_a_lasting_error_is_a_status() -> None:
    refused = bad_request("too many logprobs").body
    server = Answers({CHAT: (200, [encode(refused), DONE])})
    got = await relay_request(server, request("chat", {"messages": [USER], "stream": True}))
    assert (got.status, orjson.loads(got.body)) == (400, refused)


async def test_a_stream_that_begins_with_a_passing_error_is_relayed_as_it_is() -> None:
    events = [encode(internal_error().body), DONE]
    server = Answers({CHAT: (200, events)})
    got = await relay_request(server, request("chat", {"messages": [USER], "stream": True}))
    assert (got.status, got.body) == (200, b"".join(events))


async def test_a_stream_that_ended_but_for_its_done_gets_one() -> None:
    server = Answers({CHAT: (200, [ROLE, END])})
    got = await relay_request(server, request("chat", {"messages": [USER], "stream": True}))
    assert got.body == ROLE + END + DONE


async def test_an_event_that_is_no_json_ends_the_stream_with_an_error() -> None:
    server = Answers({CHAT: (200, [ROLE, b"data: {bad\n\n", END, DONE])})
    got = await relay_request(server, request("chat", {"messages": [USER], "stream": True}))
    assert got.body == ROLE + encode(internal_error().body) + DONE


@pytest.mark.parametrize("whole", [b"", b'{"id":"c","cho', b"[]", b'{"error":{"code":500}}'])
async def test_a_whole_answer_that_is_none_is_a_500(whole: bytes) -> None:
    server = Answers({CHAT: (200, whole)})
    got = await relay_request(server, request("chat", {"messages": [USER]}))
    assert (got.status, orjson.loads(got.body)) == (500, internal_error().body)


@pytest.mark.parametrize("events", [[], [ROLE]])
async def test_a_stream_cut_short_ends_in_an_error(events: list[bytes]) -> None:
    server = Answers({CHAT: (200, events)})
    got = await relay_request(server, request("chat", {"messages": [USER], "stream": True}))
    *_, error, done = got.body.split(b"\n\n")[:-1]
    assert error.startswith(b'data: {"error"') and done == b"data: [DONE]"


@pytest.mark.parametrize("name", ["chat", "messages", "responses"])
async def test_a_stream_with_an_error_in_it_ends_in_every_format(name: str) -> None:
    upstream = Dripping([ROLE, encode(internal_error().body), DONE])
    body = {"messages": MESSAGES, "chat": MESSAGES, "responses": {"input": "hi"}}[name]
    asked, got = request(name, body | {"stream": True}), ReceivedResponse()
    async with AppResponse(got, asked.adapter, asked.exchange) as app:
        await relay(upstream, asked, app)
    await upstream.close()
    assert got.is_ended and b"Internal server error" in got.body


async def test_a_server_that_is_away_is_an_error_while_nothing_was_sent() -> None:
    asked = request("chat", {"messages": [USER]})
    away = EngineClient("http://127.0.0.1:9", None)
    got = ReceivedResponse()
    with pytest.raises(WireError):
        async with AppResponse(got, asked.adapter, asked.exchange) as app:
            await relay(away, asked, app)
    await away.close()
    assert not got.status


@pytest.mark.parametrize(
    ("headers", "body"), [({"X-Request-Id": "my.own"}, {}), ({}, {"request_id": "my.own"})]
)
def test_the_served_sibling_bears_the_id_the_app_chose(
    headers: dict[str, str], body: dict[str, Any]
) -> None:
    exchange = ADAPTERS["chat"].open(body, EngineInfo())
    asked = Request("r", ADAPTERS["chat"], b"", b"", exchange, headers)
    reply = EngineResponse(200, [], b'{"id":"chatcmpl-my.own-3","model":"my.own-3"}', False, 0.0)
    shown = with_app_id(reply, asked, 3).body
    assert shown == b'{"id":"chatcmpl-my.own","model":"my.own-3"}'


@pytest.mark.parametrize(
    ("index", "name", "told"),
    [
        (3, "chatcmpl-my.own-3", "chatcmpl-my.own"),
        (3, "chatcmpl-myXown-3", "chatcmpl-myXown-3"),
        (0, "chatcmpl-my.own-3", "chatcmpl-my.own-3"),
        (3, None, None),
    ],
)
def test_an_answer_is_known_by_the_id_its_app_reads(
    index: int, name: str | None, told: str | None
) -> None:
    exchange = ADAPTERS["chat"].open({}, EngineInfo())
    asked = Request("r", ADAPTERS["chat"], b"", b"", exchange, {"X-Request-Id": "my.own"})
    result = SiblingResult(index, answer=Answer({}, "stop", id=name))
    assert result.answer_id(asked) == told


def test_without_an_id_of_the_apps_the_answer_stays_as_it_is() -> None:
    reply = EngineResponse(200, [], b'{"id":"chatcmpl-a-3"}', False, 0.0)
    assert with_app_id(reply, request("chat", {"messages": [USER]}), 3) is reply
