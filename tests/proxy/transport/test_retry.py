"""A request while the model is not there, over real sockets."""

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
from fakevllm.swarm.link import SwarmLink
from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.engine_client import EngineClient, LiveResponse
from fakevllm.transport.fallback import Fallback, with_model
from fakevllm.transport.request import Request, SiblingPlan
from fakevllm.transport.retry import LEAD_ONLY, RetryHandler
from fakevllm.transport.sibling_limit import SiblingLimit
from fakevllm_adapters.formats.base import EngineInfo, NotTranslated
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.formats.sse import DONE, encode
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.errors import WireError, unavailable
from fakevllm_adapters.protocol.reasons import OutageReason
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
"""Status and body of a response, and headers where a test wants some."""


class ScriptedServer:
    """Gives its answers one after the other, and the last for ever: an error, or a good one; a
    None closes the connection."""

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
        status, told, *headers = answer
        if status == 200 and body.get("stream"):
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(request)
            await stream.write(b"".join(EVENTS))
            return stream
        if status == 200 and request.path.endswith("/completions") and "prompt" in body:
            told = TEXT_ANSWER
        return web.json_response(told, status=status, headers=headers[0] if headers else None)

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
    except NotTranslated as why:
        return Request("r", adapter, raw, raw, None, {}, str(why), model="mine")
    is_same = adapter.path == adapter.upstream_path
    asked = raw if is_same else orjson.dumps(exchange.body)
    return Request("r", adapter, raw, asked, exchange, {}, model="mine")


async def relay_request(
    url: str,
    request: Request,
    limit_s: float = 10.0,
    fallback: Fallback | None = None,
    sibling_limit: SiblingLimit | None = None,
    plan: SiblingPlan = LEAD_ONLY,
) -> tuple[ReceivedResponse, OutageReason | None]:
    """As the runner does it."""
    got, upstream = ReceivedResponse(), EngineClient(url, None)
    trouble: OutageReason | None = None
    try:
        async with AppResponse(got, request.adapter, request.exchange) as app:
            try:
                retry_handler = RetryHandler(
                    upstream, None, limit_s, fallback, sibling_limit=sibling_limit
                )
                _, trouble = await retry_handler.relay(request, app, plan)
            except WireError as error:
                await app.refuse(error)
    finally:
        await upstream.close()
        if fallback is not None:
            await fallback.close()
    return got, trouble


async def closed_server_url() -> str:
    """The address of a server that was there."""
    async with ScriptedServer((200, ANSWER)).running() as server:
        return server.url


BOTH_MODES = pytest.mark.parametrize("stream", [False, True])
ALL_FORMATS = pytest.mark.parametrize("name", list(ADAPTERS))


@BOTH_MODES
@ALL_FORMATS
async def test_a_booting_engine_is_waited_for(name: str, stream: bool) -> None:
    async with ScriptedServer(
        (503, NOT_READY), (503, NOT_READY), (200, ANSWER)
    ).running() as server:
        got, trouble = await relay_request(server.url, request_for(name, stream=stream))
    assert got.status == 200 and (b"Hello." in got.body or b"Hi" in got.body)
    assert trouble is None and len(server.requests) == 3


async def test_a_server_that_comes_back_is_asked_again_and_its_answer_is_the_apps() -> None:
    url = await closed_server_url()
    asking = asyncio.create_task(relay_request(url, request_for("chat")))
    async with ScriptedServer((200, ANSWER), port=int(url.rpartition(":")[2])).running():
        got, trouble = await asking
    assert (got.status, orjson.loads(got.body), trouble) == (200, ANSWER, None)


async def test_nothing_is_asked_by_a_name_that_may_not_be_the_models() -> None:
    names: list[str | None] = [None, None, "served"]  # the last is known at the third try

    def served_name(asked: str) -> str | None:
        name = names.pop(0)
        if name is None:
            raise unavailable("No name is known yet.", OutageReason.ENGINE_NOT_READY)
        return name

    got, request = ReceivedResponse(), request_for("chat")
    async with ScriptedServer((200, ANSWER)).running() as server:
        upstream = EngineClient(server.url, None)
        async with AppResponse(got, request.adapter, request.exchange) as app:
            retry_handler = RetryHandler(upstream, None, 10.0, served_name=served_name)
            await retry_handler.relay(request, app)
        await upstream.close()
    assert got.status == 200 and names == []
    assert [body["model"] for _, body, _ in server.requests] == ["served"]


async def test_a_request_that_breaks_its_server_twice_is_not_sent_a_third_time() -> None:
    async with ScriptedServer(None).running() as server:
        got, _ = await relay_request(server.url, request_for("chat"))
    assert got.status == 503 and len(server.requests) == 2


async def test_a_request_that_its_engine_failed_is_not_sent_again() -> None:
    async with ScriptedServer((503, FAILED)).running() as server:
        got, _ = await relay_request(server.url, request_for("chat"))
    assert (got.status, orjson.loads(got.body)) == (503, FAILED) and len(server.requests) == 1
    assert got.headers[b"retry-after"] == b"2"


@BOTH_MODES
@ALL_FORMATS
async def test_without_a_fallback_the_app_gets_a_503_as_a_status(name: str, stream: bool) -> None:
    got, trouble = await relay_request(
        await closed_server_url(), request_for(name, stream=stream), 0.1
    )
    assert got.status == 503 and got.headers[b"retry-after"] == b"2" and trouble is None
    worded = orjson.loads(got.body)
    assert worded.get("type") == "error" if name == "messages" else worded["error"]["code"] == 503


async def test_a_clients_own_limit_shortens_the_wait() -> None:
    request = request_for("chat")
    hasty = Request(
        "r",
        request.adapter,
        request.raw,
        request.upstream_body,
        request.exchange,
        {},
        app_headers={b"x-stainless-read-timeout": b"0.2"},
    )
    async with asyncio.timeout(30):
        got, _ = await relay_request(await closed_server_url(), hasty, 3600)
    assert got.status == 503


# --- the fallback


class HangingClient(EngineClient):
    """Takes a call and keeps it, as a server does whose engine is started again."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9", None)
        self.is_asked = asyncio.Event()

    @asynccontextmanager
    async def live(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[LiveResponse]:
        self.is_asked.set()
        await asyncio.Event().wait()
        yield LiveResponse(200, [], False, _nothing())


async def _nothing() -> AsyncGenerator[bytes]:
    for nothing in ():
        yield nothing


@asynccontextmanager
async def link_at(folder: Path, state: EngineStatus) -> AsyncGenerator[SwarmLink]:
    """One that has heard of this state, and hears nothing more."""
    ledger = Ledger.open(folder / "ledger.sqlite")
    link = SwarmLink("http://127.0.0.1:9", None, TrainJob(), ledger)
    link.status = EngineStatusReply(engine_status=state, server_id="s")
    try:
        yield link
    finally:
        await link.close()
        ledger.close()


async def test_a_request_that_a_server_keeps_while_its_engine_is_away_goes_to_the_fallback(
    tmp_path: Path,
) -> None:
    upstream, request = HangingClient(), request_for("chat")
    got = ReceivedResponse()
    async with ScriptedServer((200, ANSWER)).running() as other, link_at(tmp_path, BOOTING) as link:
        fallback = Fallback(other.url, None, None)
        async with AppResponse(got, request.adapter, request.exchange) as app:
            _, trouble = await RetryHandler(upstream, link, 0.2, fallback).relay(request, app)
        await fallback.close()
    await upstream.close()
    assert (got.status, trouble) == (
        200,
        OutageReason.ENGINE_NOT_READY,
    ) and upstream.is_asked.is_set()


async def test_an_engine_that_steps_is_waited_for_and_not_given_up(tmp_path: Path) -> None:
    upstream, request = HangingClient(), request_for("chat")
    async with ScriptedServer((200, ANSWER)).running() as other, link_at(tmp_path, SYNCING) as link:
        fallback = Fallback(other.url, None, None)
        async with AppResponse(ReceivedResponse(), request.adapter, request.exchange) as app:
            retry_handler = RetryHandler(upstream, link, 0.0, fallback)
            with pytest.raises(TimeoutError):  # it would wait for ever
                async with asyncio.timeout(1.2):
                    await retry_handler.relay(request, app)
        await fallback.close()
        assert other.requests == []
    await upstream.close()


async def test_an_engine_that_was_stopped_is_not_waited_for(tmp_path: Path) -> None:
    request = request_for("chat")
    async with (
        ScriptedServer((503, NOT_READY)).running() as server,
        link_at(tmp_path, OFFLINE) as link,
    ):
        assert link.may_become_ready, "this link has not started it yet"
        link._started_server_id = "s"  # pyright: ignore[reportPrivateUsage] - it had
        assert not link.may_become_ready
        upstream = EngineClient(server.url, None)
        async with AppResponse(ReceivedResponse(), request.adapter, request.exchange) as app:
            with pytest.raises(WireError, match="not ready"):
                await RetryHandler(upstream, link, 3600).relay(request, app)
        await upstream.close()
    assert len(server.requests) == 1


@BOTH_MODES
@ALL_FORMATS
async def test_the_fallback_answers_in_every_format_and_by_the_name_it_knows(
    name: str, stream: bool
) -> None:
    async with ScriptedServer((200, ANSWER), prefix="/below/v1").running() as other:
        fallback = Fallback(other.url, "sk-other", "theirs")
        request = request_for(name, stream=stream)
        got, trouble = await relay_request(await closed_server_url(), request, 0.1, fallback)
    assert got.status == 200 and (b"Hello." in got.body or b"Hi" in got.body)
    assert trouble is OutageReason.SERVER_UNREACHABLE
    ((path, body, headers),) = other.requests
    assert path == f"/below{ADAPTERS[name].upstream_path}" and body["model"] == "theirs"
    assert headers["Authorization"] == "Bearer sk-other"
    assert "continuous_usage_stats" not in json.dumps(body)
    assert not any("sibling" in header.lower() for header in headers)


async def test_the_fallback_is_asked_for_the_apps_own_name_by_default() -> None:
    async with ScriptedServer((200, ANSWER)).running() as other:
        request = with_model(request_for("chat"), "served")
        await relay_request(
            await closed_server_url(), request, 0.0, Fallback(other.url, None, None)
        )
    assert other.requests[0][1]["model"] == "mine" and "Authorization" not in other.requests[0][2]


async def test_a_request_only_the_engines_own_route_can_answer_goes_to_the_fallbacks() -> None:
    request = request_for("responses", background=True)
    assert request.exchange is None
    async with ScriptedServer((200, {"id": "resp_1"})).running() as other:
        got, _ = await relay_request(
            await closed_server_url(), request, 0.0, Fallback(other.url, None, "theirs")
        )
    assert (got.status, got.body) == (200, b'{"id": "resp_1"}')
    path, body, _ = other.requests[0]
    assert path == "/v1/responses" and body["model"] == "theirs" and body["background"] is True


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
async def test_what_a_fallback_refuses_is_no_answer_and_the_app_is_told_to_come_back(
    status: int,
) -> None:
    said = {"error": {"message": "sk-other is no key", "code": status}}
    async with ScriptedServer((status, said)).running() as other:
        fallback = Fallback(other.url, "sk-other", None)
        got, trouble = await relay_request(
            await closed_server_url(), request_for("chat"), 0.0, fallback
        )
    assert got.status == 503 and got.headers[b"retry-after"] == b"2" and trouble is None
    assert b"cannot be reached" in got.body and b"sk-other" not in got.body


@BOTH_MODES
async def test_a_fallback_that_takes_the_call_and_says_nothing_is_no_answer(stream: bool) -> None:
    begins_s = {"stream_begins_s": 60.0, "answer_begins_s": 60.0}
    begins_s["stream_begins_s" if stream else "answer_begins_s"] = 0.2
    with socket.create_server(("127.0.0.1", 0)) as mute:
        fallback = Fallback(f"http://127.0.0.1:{mute.getsockname()[1]}", None, None, **begins_s)
        async with asyncio.timeout(20):
            request = request_for("chat", stream=stream)
            got, trouble = await relay_request(await closed_server_url(), request, 0.0, fallback)
    assert got.status == 503 and b"cannot be reached" in got.body and trouble is None


class SlowServer(ScriptedServer):
    """Begins its stream at once, and says something later."""

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await asyncio.sleep(0.6)
        await stream.write(b"".join(EVENTS))
        return stream


async def test_a_fallback_that_has_begun_is_not_hurried() -> None:
    async with SlowServer((200, ANSWER)).running() as other:
        fallback = Fallback(other.url, None, None, stream_begins_s=0.3)
        got, _ = await relay_request(
            await closed_server_url(), request_for("chat", stream=True), 0.0, fallback
        )
    assert got.status == 200 and b"Hello." in got.body


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        ((503, NOT_READY), OutageReason.ENGINE_NOT_READY),
        ((503, FAILED), OutageReason.ENGINE_FAILED),
        ((502, "<html>"), OutageReason.ENGINE_FAILED),
        (None, OutageReason.SERVER_BROKE_OFF),
    ],
)
async def test_the_ledger_is_told_what_the_fallback_was_for(
    answer: Any, trouble: OutageReason
) -> None:
    async with (
        ScriptedServer(answer).running() as server,
        ScriptedServer((200, ANSWER)).running() as other,
    ):
        fallback = Fallback(other.url, None, None)
        got, why = await relay_request(server.url, request_for("chat"), 0.0, fallback)
    assert (got.status, why) == (200, trouble)


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500])
async def test_an_answer_that_is_an_error_is_the_apps_and_nobody_elses(status: int) -> None:
    said = {"error": {"message": "as it is", "code": status}}
    async with (
        ScriptedServer((status, said)).running() as server,
        ScriptedServer((200, ANSWER)).running() as other,
    ):
        fallback = Fallback(other.url, None, None)
        got, trouble = await relay_request(server.url, request_for("chat"), 10.0, fallback)
    assert (got.status, orjson.loads(got.body), trouble) == (status, said, None)
    assert len(server.requests) == 1 and other.requests == []
