"""The swarm server's reason header: the proxy uses it, and no app ever receives it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from aiohttp import web

from fakevllm.config.model import load
from fakevllm.transport.retry_handler import failure_reason
from fakevllm.web.app import create_app
from fakevllm.web.proxy_components import open_proxy
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.protocol.errors import unavailable
from fakevllm_adapters.protocol.outage_reasons import REASON_HEADER, OutageReason
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.proxy.scripted_swarm import ScriptedSwarm, until
from tests.proxy.transport.test_retry_handler import (
    ANSWER,
    EVENTS,
    ScriptedServer,
    relay_request,
    request_for,
)

HEADER = "X-Fakevllm-Reason"
MESSAGES = (
    "Come back later.",
    "The engine is not ready: ENGINE.BOOTING.",
    "The engine did not answer; it is being started again.",
    "Too many requests are waiting.",
)
ANY_MESSAGE = pytest.mark.parametrize("message", MESSAGES)
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
    "completions": {"model": "fake", "prompt": "hi"},
    "responses": {"model": "fake", "input": "hi"},
    "messages": {
        "model": "fake",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
    },
}


def refusal(reason: str, message: str) -> tuple[int, Any, dict[str, str]]:
    return 503, unavailable(message).body, {HEADER: reason}


def test_the_header_has_the_documented_name() -> None:
    assert REASON_HEADER == HEADER


@ANY_MESSAGE
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_waits_for_an_engine_that_is_not_ready_whatever_the_message(
    message: str, stream: bool
) -> None:
    async with ScriptedServer(
        refusal("engine_not_ready", message), (200, ANSWER)
    ).running() as server:
        received, _ = await relay_request(server.url, request_for("chat", stream=stream))
    assert received.status == 200 and len(server.requests) == 2


@ANY_MESSAGE
@pytest.mark.parametrize("reason", ["engine_failed", "engine_busy"])
async def test_a_request_to_a_failed_or_busy_engine_is_not_retried_whatever_the_message(
    message: str, reason: str
) -> None:
    async with ScriptedServer(refusal(reason, message)).running() as server:
        received, _ = await relay_request(server.url, request_for("chat"))
    assert received.status == 503 and len(server.requests) == 1
    assert orjson.loads(received.body)["error"]["message"] == message


def test_the_ledger_shows_an_unreachable_server_by_reason_and_any_other_outage_by_status() -> None:
    for message in MESSAGES:
        shown = [failure_reason(unavailable(message, reason)) for reason in OutageReason]
        assert shown == ["upstream_unreachable"] * 2 + ["upstream_503"] * 3


class ReasonSwarm(ScriptedSwarm):
    """A swarm server that sends the reason header with every answer of its model routes."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self._status = status

    async def _answer(self, request: web.Request) -> web.StreamResponse:  # pyright: ignore[reportIncompatibleMethodOverride]
        if request.path in self.answers:
            return await super()._answer(request)
        self.calls[request.path] += 1
        headers = {HEADER: "engine_busy"}
        if self._status != 200:
            return web.json_response(
                unavailable("Come back later.").body, status=self._status, headers=headers
            )
        if request.can_read_body and (await request.json()).get("stream"):
            stream = web.StreamResponse(headers=headers | {"Content-Type": "text/event-stream"})
            await stream.prepare(request)
            await stream.write(b"".join(EVENTS))
            return stream
        return web.json_response(ANSWER, headers=headers)


@contextlib.asynccontextmanager
async def proxy_before(
    swarm: ReasonSwarm, folder: Path, **settings: Any
) -> AsyncGenerator[httpx.AsyncClient]:
    settings |= {"proxy": {"run_dir": folder}, "swarm": {"url": swarm.url}}
    settings |= {"upstream": {"hold_s": 0.0}}
    async with open_proxy(load(None, settings)) as proxy:
        await until(lambda: proxy.link.is_serving)
        transport = httpx.ASGITransport(create_app(proxy))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


@pytest.mark.parametrize("status", [200, 400, 404, 429, 500, 502, 503])
@pytest.mark.parametrize("is_sampled", [False, True])
async def test_no_app_sees_the_header_in_a_whole_a_streamed_or_a_sampled_answer(
    tmp_path: Path, status: int, is_sampled: bool
) -> None:
    hooks = {"hooks": {"path": write_hooks(tmp_path / "hooks", PREFER_YES)}} if is_sampled else {}
    async with (
        ReasonSwarm(status) as swarm,
        proxy_before(swarm, tmp_path, **hooks) as client,
    ):
        for name, body in BODIES.items():
            for stream in (False, True):
                json_body = body | {"stream": stream}
                answer = await client.post(ADAPTERS[name].path, json=json_body)
                assert HEADER not in answer.headers
                assert b"engine_busy" not in answer.content
        # Invalid JSON is answered by the engine's own route.
        answer = await client.post("/v1/chat/completions", content=b"{")
        assert HEADER not in answer.headers
    assert swarm.calls["/v1/chat/completions"] > 4, "the swarm server answered"


@pytest.mark.parametrize("status", [200, 404, 503])
async def test_no_app_sees_the_header_on_a_route_that_is_passed_through(
    tmp_path: Path, status: int
) -> None:
    async with ReasonSwarm(status) as swarm, proxy_before(swarm, tmp_path) as client:
        for path in ("/version", "/load", "/metrics", "/v1/models"):
            answer = await client.get(path)
            assert HEADER not in answer.headers and swarm.calls[path] > 0
        answer = await client.post("/tokenize", json={"prompt": "hi"})
        assert HEADER not in answer.headers and swarm.calls["/tokenize"] == 1
