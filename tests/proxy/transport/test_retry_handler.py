"""Requests while the engine is unavailable, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from fakevllm.ledger.store import Ledger
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.engine_client import EngineClient, LiveResponse
from fakevllm.transport.fallback_server import Fallback, with_model
from fakevllm.transport.request import Request, SiblingPlan
from fakevllm.transport.retry_handler import LEAD_ONLY, RetryHandler
from fakevllm.transport.sibling_limit import SiblingLimit
from fakevllm_adapters.formats.base import EngineInfo, NotTranslated
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.formats.sse import DONE, encode
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.errors import WireError, unavailable
from fakevllm_adapters.protocol.outage_reasons import OutageReason
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply

BOOTING, SYNCING = EngineStatus.BOOTING, EngineStatus.WEIGHT_SYNCING
OFFLINE = EngineStatus.OFFLINE

USER = {"role": "user", "content": "hi"}
CHAT = "/v1/chat/completions"
NOT_READY = unavailable("The engine is not ready: ENGINE.BOOTING.").body
FAILED = unavailable("The engine did not answer; it is being started again.").body
MESSAGE = {"role": "assistant", "content": "Hello."}
ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
CHUNK: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
DELTA = {"index": 0, "delta": MESSAGE, "finish_reason": "stop"}
EVENTS = [encode(CHUNK | {"choices": [DELTA]}), DONE]
WHOLE = {"text": "Hi", "index": 0, "finish_reason": "stop", "logprobs": None}
TEXT_ANSWER = ANSWER | {"object": "text_completion", "choices": [WHOLE]}


Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]
"""Status and body of a response, and optionally its headers."""


class ScriptedServer:
    """A server that sends the given answers in turn, and repeats the last. None closes the
    connection without an answer."""

    def __init__(self, *answers: Answer | None, port: int = 0, prefix: str = "") -> None:
        self._answers = list(answers)
        self._prefix = prefix
        self.port = port
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self._prefix}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, body, dict(request.headers)))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is None:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        status, content, *headers = answer
        if status == 200 and body.get("stream"):
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(request)
            await stream.write(b"".join(EVENTS))
            return stream
        if status == 200 and request.path.endswith("/completions") and "prompt" in body:
            content = TEXT_ANSWER
        return web.json_response(content, status=status, headers=headers[0] if headers else None)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[ScriptedServer]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()


class ReceivedResponse:
    """The response as the app receives it."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.headers |= dict(message.get("headers", []))
        self.body += message.get("body", b"")


def request_for(name: str, *, stream: bool = False, **more: Any) -> Request:
    adapter = ADAPTERS[name]
    body: dict[str, Any] = {"model": "mine", **more}
    body |= {"prompt": "hi"} if name == "completions" else {}
    body |= {"input": "hi"} if name == "responses" else {}
    body |= {"messages": [USER]} if name in ("chat", "messages") else {}
    body |= {"max_tokens": 9} if name == "messages" else {}
    body |= {"stream": True} if stream else {}
    raw = orjson.dumps(body)
    try:
        exchange = adapter.open(body, EngineInfo("mine", 4096, None))
    except NotTranslated as error:
        return Request("r", adapter, raw, raw, None, {}, str(error), model="mine")
    is_same = adapter.path == adapter.upstream_path
    upstream_body = raw if is_same else orjson.dumps(exchange.body)
    return Request("r", adapter, raw, upstream_body, exchange, {}, model="mine")


async def relay_request(
    url: str,
    request: Request,
    limit_s: float = 10.0,
    fallback: Fallback | None = None,
    sibling_limit: SiblingLimit | None = None,
    plan: SiblingPlan = LEAD_ONLY,
) -> tuple[ReceivedResponse, OutageReason | None]:
    """Relay a request as the pipeline does. Return the app's response and the reason for the
    fallback."""
    received, upstream = ReceivedResponse(), EngineClient(url, None)
    reason: OutageReason | None = None
    try:
        async with AppResponse(received, request.adapter, request.exchange) as app:
            try:
                retry_handler = RetryHandler(
                    upstream, None, limit_s, fallback, sibling_limit=sibling_limit
                )
                _, reason = await retry_handler.relay(request, app, plan)
            except WireError as error:
                await app.refuse(error)
    finally:
        await upstream.close()
        if fallback is not None:
            await fallback.close()
    return received, reason


async def closed_server_url() -> str:
    """Return the address of a server that has stopped."""
    async with ScriptedServer((200, ANSWER)).running() as server:
        return server.url


BOTH_MODES = pytest.mark.parametrize("stream", [False, True])
ALL_FORMATS = pytest.mark.parametrize("name", list(ADAPTERS))


@BOTH_MODES
@ALL_FORMATS
async def test_a_request_waits_for_a_booting_engine(name: str, stream: bool) -> None:
    async with ScriptedServer(
        (503, NOT_READY), (503, NOT_READY), (200, ANSWER)
    ).running() as server:
        received, reason = await relay_request(server.url, request_for(name, stream=stream))
    assert received.status == 200 and (b"Hello." in received.body or b"Hi" in received.body)
    assert reason is None and len(server.requests) == 3


async def test_a_request_is_retried_when_its_server_is_back() -> None:
    url = await closed_server_url()
    relaying = asyncio.create_task(relay_request(url, request_for("chat")))
    async with ScriptedServer((200, ANSWER), port=int(url.rpartition(":")[2])).running():
        received, reason = await relaying
    assert (received.status, orjson.loads(received.body), reason) == (200, ANSWER, None)


async def test_a_request_for_an_alias_is_sent_only_once_the_served_model_is_known() -> None:
    names: list[str | None] = [None, None, "served"]  # the model is known at the third attempt

    def served_name(alias: str) -> str | None:
        name = names.pop(0)
        if name is None:
            raise unavailable("No name is known yet.", OutageReason.ENGINE_NOT_READY)
        return name

    received, request = ReceivedResponse(), request_for("chat")
    async with ScriptedServer((200, ANSWER)).running() as server:
        upstream = EngineClient(server.url, None)
        async with AppResponse(received, request.adapter, request.exchange) as app:
            retry_handler = RetryHandler(upstream, None, 10.0, served_name=served_name)
            await retry_handler.relay(request, app)
        await upstream.close()
    assert received.status == 200 and names == []
    assert [body["model"] for _, body, _ in server.requests] == ["served"]


async def test_a_request_whose_server_broke_off_three_times_is_not_sent_again() -> None:
    async with ScriptedServer(None).running() as server:
        received, _ = await relay_request(server.url, request_for("chat"))
    assert received.status == 503 and len(server.requests) == 3


async def test_a_request_that_failed_in_the_engine_is_not_sent_again() -> None:
    async with ScriptedServer((503, FAILED)).running() as server:
        received, _ = await relay_request(server.url, request_for("chat"))
    assert (received.status, orjson.loads(received.body)) == (503, FAILED) and len(
        server.requests
    ) == 1
    assert received.headers[b"retry-after"] == b"2"


@BOTH_MODES
@ALL_FORMATS
async def test_without_a_fallback_the_app_gets_a_503_as_a_status(name: str, stream: bool) -> None:
    received, reason = await relay_request(
        await closed_server_url(), request_for(name, stream=stream), 0.1
    )
    assert received.status == 503 and received.headers[b"retry-after"] == b"2" and reason is None
    error_body = orjson.loads(received.body)
    assert (
        error_body.get("type") == "error"
        if name == "messages"
        else error_body["error"]["code"] == 503
    )


async def test_the_timeout_of_a_client_shortens_the_wait() -> None:
    request = request_for("chat")
    impatient = Request(
        "r",
        request.adapter,
        request.raw,
        request.upstream_body,
        request.exchange,
        {},
        app_headers={b"x-stainless-read-timeout": b"0.2"},
    )
    async with asyncio.timeout(30):
        received, _ = await relay_request(await closed_server_url(), impatient, 3600)
    assert received.status == 503


# --- the fallback


class HangingClient(EngineClient):
    """A client whose calls never end, as with a server whose engine is restarting."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9", None)
        self.is_called = asyncio.Event()

    @asynccontextmanager
    async def live(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[LiveResponse]:
        self.is_called.set()
        await asyncio.Event().wait()
        yield LiveResponse(200, [], False, _nothing())


async def _nothing() -> AsyncGenerator[bytes]:
    for nothing in ():
        yield nothing


@asynccontextmanager
async def link_at(folder: Path, state: EngineStatus) -> AsyncGenerator[SwarmLink]:
    """Yield a link that knows this state and receives no further status."""
    ledger = Ledger.open(folder / "ledger.sqlite")
    link = SwarmLink("http://127.0.0.1:9", None, TrainJob(), ledger)
    link.status = EngineStatusReply(engine_status=state, server_id="s")
    try:
        yield link
    finally:
        await link.close()
        ledger.close()


async def test_a_gateway_that_breaks_off_while_its_server_is_away_is_asked_again(
    tmp_path: Path,
) -> None:
    request = request_for("chat")
    answers: list[Answer | None] = [None] * 4
    async with (
        ScriptedServer(*answers, (200, ANSWER)).running() as gateway,
        link_at(tmp_path, SYNCING) as link,
    ):
        upstream = EngineClient(gateway.url, None)
        async with AppResponse(ReceivedResponse(), request.adapter, request.exchange) as app:
            reply, reason = await RetryHandler(upstream, link, 3600).relay(request, app)
        await upstream.close()
    assert (reply.status, reason, len(gateway.requests)) == (200, None, 5)


async def test_a_request_held_by_a_server_without_engine_goes_to_the_fallback(
    tmp_path: Path,
) -> None:
    upstream, request = HangingClient(), request_for("chat")
    received = ReceivedResponse()
    async with ScriptedServer((200, ANSWER)).running() as other, link_at(tmp_path, BOOTING) as link:
        fallback = Fallback(other.url, None, None)
        async with AppResponse(received, request.adapter, request.exchange) as app:
            _, reason = await RetryHandler(upstream, link, 0.2, fallback).relay(request, app)
        await fallback.close()
    await upstream.close()
    assert (received.status, reason) == (
        200,
        OutageReason.ENGINE_NOT_READY,
    ) and upstream.is_called.is_set()


async def test_a_request_waits_for_an_engine_that_takes_a_training_step(tmp_path: Path) -> None:
    upstream, request = HangingClient(), request_for("chat")
    async with ScriptedServer((200, ANSWER)).running() as other, link_at(tmp_path, SYNCING) as link:
        fallback = Fallback(other.url, None, None)
        async with AppResponse(ReceivedResponse(), request.adapter, request.exchange) as app:
            retry_handler = RetryHandler(upstream, link, 0.0, fallback)
            with pytest.raises(TimeoutError):  # the request would wait without end
                async with asyncio.timeout(1.2):
                    await retry_handler.relay(request, app)
        await fallback.close()
        assert other.requests == []
    await upstream.close()


async def test_a_request_does_not_wait_for_an_engine_that_was_stopped(tmp_path: Path) -> None:
    request = request_for("chat")
    async with (
        ScriptedServer((503, NOT_READY)).running() as server,
        link_at(tmp_path, OFFLINE) as link,
    ):
        assert link.may_become_ready, "the link has not started the engine yet"
        link._started_server_id = "s"  # pyright: ignore[reportPrivateUsage]
        assert not link.may_become_ready
        upstream = EngineClient(server.url, None)
        async with AppResponse(ReceivedResponse(), request.adapter, request.exchange) as app:
            with pytest.raises(WireError, match="not ready"):
                await RetryHandler(upstream, link, 3600).relay(request, app)
        await upstream.close()
    assert len(server.requests) == 1


@BOTH_MODES
@ALL_FORMATS
async def test_the_fallback_answers_in_every_format_under_its_own_model_name(
    name: str, stream: bool
) -> None:
    async with ScriptedServer((200, ANSWER), prefix="/below/v1").running() as other:
        fallback = Fallback(other.url, "sk-other", "theirs")
        request = request_for(name, stream=stream)
        received, reason = await relay_request(await closed_server_url(), request, 0.1, fallback)
    assert received.status == 200 and (b"Hello." in received.body or b"Hi" in received.body)
    assert reason is OutageReason.SERVER_UNREACHABLE
    ((path, body, headers),) = other.requests
    assert path == f"/below{ADAPTERS[name].upstream_path}" and body["model"] == "theirs"
    assert headers["Authorization"] == "Bearer sk-other"
    assert "continuous_usage_stats" not in json.dumps(body)
    assert not any("sibling" in header.lower() for header in headers)


async def test_by_default_the_fallback_gets_the_model_name_that_the_app_sent() -> None:
    async with ScriptedServer((200, ANSWER)).running() as other:
        request = with_model(request_for("chat"), "served")
        await relay_request(
            await closed_server_url(), request, 0.0, Fallback(other.url, None, None)
        )
    assert other.requests[0][1]["model"] == "mine" and "Authorization" not in other.requests[0][2]


async def test_a_request_for_an_engines_own_route_goes_to_the_fallbacks_own_route() -> None:
    request = request_for("responses", background=True)
    assert request.exchange is None
    async with ScriptedServer((200, {"id": "resp_1"})).running() as other:
        received, _ = await relay_request(
            await closed_server_url(), request, 0.0, Fallback(other.url, None, "theirs")
        )
    assert (received.status, received.body) == (200, b'{"id": "resp_1"}')
    path, body, _ = other.requests[0]
    assert path == "/v1/responses" and body["model"] == "theirs" and body["background"] is True


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
async def test_a_refusal_of_the_fallback_becomes_a_503_with_retry_after(
    status: int,
) -> None:
    error_body = {"error": {"message": "sk-other is no key", "code": status}}
    async with ScriptedServer((status, error_body)).running() as other:
        fallback = Fallback(other.url, "sk-other", None)
        received, reason = await relay_request(
            await closed_server_url(), request_for("chat"), 0.0, fallback
        )
    assert received.status == 503 and received.headers[b"retry-after"] == b"2" and reason is None
    assert b"cannot be reached" in received.body and b"sk-other" not in received.body


@BOTH_MODES
async def test_a_fallback_that_never_begins_its_answer_becomes_a_503(stream: bool) -> None:
    begins_s = {"stream_begins_s": 60.0, "answer_begins_s": 60.0}
    begins_s["stream_begins_s" if stream else "answer_begins_s"] = 0.2
    with socket.create_server(("127.0.0.1", 0)) as mute:
        fallback = Fallback(f"http://127.0.0.1:{mute.getsockname()[1]}", None, None, **begins_s)
        async with asyncio.timeout(20):
            request = request_for("chat", stream=stream)
            received, reason = await relay_request(
                await closed_server_url(), request, 0.0, fallback
            )
    assert received.status == 503 and b"cannot be reached" in received.body and reason is None


class SlowServer(ScriptedServer):
    """A server that starts its stream at once and sends data later."""

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await asyncio.sleep(0.6)
        await stream.write(b"".join(EVENTS))
        return stream


async def test_a_fallback_that_has_begun_its_answer_has_no_further_time_limit() -> None:
    async with SlowServer((200, ANSWER)).running() as other:
        fallback = Fallback(other.url, None, None, stream_begins_s=0.3)
        received, _ = await relay_request(
            await closed_server_url(), request_for("chat", stream=True), 0.0, fallback
        )
    assert received.status == 200 and b"Hello." in received.body


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((503, NOT_READY), OutageReason.ENGINE_NOT_READY),
        ((503, FAILED), OutageReason.ENGINE_FAILED),
        ((502, "<html>"), OutageReason.ENGINE_FAILED),
        (None, OutageReason.SERVER_BROKE_OFF),
    ],
)
async def test_the_reason_for_the_fallback_is_returned(answer: Any, reason: OutageReason) -> None:
    async with (
        ScriptedServer(answer).running() as server,
        ScriptedServer((200, ANSWER)).running() as other,
    ):
        fallback = Fallback(other.url, None, None)
        received, shown = await relay_request(server.url, request_for("chat"), 0.0, fallback)
    assert (received.status, shown) == (200, reason)


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500])
async def test_an_error_that_is_no_outage_is_relayed_and_not_retried(status: int) -> None:
    error_body = {"error": {"message": "as it is", "code": status}}
    async with (
        ScriptedServer((status, error_body)).running() as server,
        ScriptedServer((200, ANSWER)).running() as other,
    ):
        fallback = Fallback(other.url, None, None)
        received, reason = await relay_request(server.url, request_for("chat"), 10.0, fallback)
    assert (received.status, orjson.loads(received.body), reason) == (status, error_body, None)
    assert len(server.requests) == 1 and other.requests == []
