"""Spans of requests that a proxy without hooks serves once, or cannot serve."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakevllm.config.model import load
from fakevllm.web.app import create_app
from fakevllm.web.proxy_components import open_proxy
from tests.proxy.scripted_swarm import ScriptedSwarm
from tests.proxy.tracing.finished_traces import PARENT
from tests.proxy.tracing.otlp_collector import OtlpCollector

CHAT = "/v1/chat/completions"
QUESTION = "A question that must stay here."
BODY: dict[str, Any] = {
    "model": "gpt-4o",
    "messages": [{"role": "user", "content": QUESTION}],
    "max_completion_tokens": 9,
}
ANSWER: dict[str, Any] = {
    "id": "chatcmpl-7",
    "model": "m",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2},
}


@pytest.fixture(autouse=True)
def log_of_the_sdk() -> Iterator[None]:
    """Restore the logger that the exporter redirects."""
    logger = logging.getLogger("opentelemetry")
    handlers, propagate = logger.handlers, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate


@asynccontextmanager
async def client_of(
    folder: Path, collector: OtlpCollector, answer: Any, **sections: Any
) -> AsyncGenerator[httpx.AsyncClient]:
    """Run a proxy whose engine gives this answer. At the end of the block, all spans are sent."""
    async with ScriptedSwarm() as swarm:
        swarm.answers[CHAT] = answer
        flags = {
            "proxy": {"run_dir": folder},
            "swarm": {"url": swarm.url},
            "models": {"aliases": ["gpt-4o"]},
            "upstream": {"hold_s": 0},
            "tracing": {"url": collector.url},
        }
        async with open_proxy(load(None, flags | sections)) as proxy:
            await proxy.link.reached.wait()
            transport = httpx.ASGITransport(create_app(proxy))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1"
            ) as client:
                yield client


async def test_a_request_that_is_served_once_has_a_span_and_one_call(tmp_path: Path) -> None:
    with OtlpCollector() as collector:
        async with client_of(tmp_path, collector, ANSWER) as client:
            reply = await client.post(CHAT, json=BODY, headers={"traceparent": PARENT})
    assert reply.status_code == 200 and reply.json()["model"] == "gpt-4o"
    [request], [call] = collector.of_kind("SERVER"), collector.of_kind("CLIENT")
    assert (request.name, call.name) == ("chat gpt-4o", "chat fake")
    assert {request.trace_id, call.trace_id} == {PARENT.split("-")[1]}
    assert (request.parent_id, call.parent_id) == (PARENT.split("-")[2], request.span_id)
    for span in (request, call):
        assert span.attributes["gen_ai.request.max_tokens"] == 9
        assert span.attributes["gen_ai.response.id"] == "chatcmpl-7"
        assert span.attributes["gen_ai.response.model"] == "m"
        assert span.attributes["gen_ai.response.finish_reasons"] == ["stop"]
        assert span.attributes["gen_ai.usage.input_tokens"] == 5
        assert span.attributes["gen_ai.usage.output_tokens"] == 2
        assert span.attributes["http.response.status_code"] == 200
        assert not span.is_error and span.duration_s > 0
    assert request.attributes["fakevllm.group.state"] == "served"
    assert QUESTION.encode() not in b"".join(collector.raw)


@pytest.mark.parametrize(("status", "is_error"), [(400, False), (500, True)])
async def test_an_error_of_the_engine_is_an_error_of_the_call(
    tmp_path: Path, status: int, is_error: bool
) -> None:
    with OtlpCollector() as collector:
        async with client_of(tmp_path, collector, status) as client:
            reply = await client.post(CHAT, json=BODY)
    assert reply.status_code == status
    [request], [call] = collector.of_kind("SERVER"), collector.of_kind("CLIENT")
    assert call.is_error and call.attributes["error.type"] == str(status)
    assert request.attributes["error.type"] == f"upstream_{status}"
    assert request.is_error is is_error


async def test_the_fallback_server_has_a_call_of_its_own(tmp_path: Path) -> None:
    async with ScriptedSwarm() as other:
        other.answers[CHAT] = ANSWER | {"model": "theirs"}
        with OtlpCollector() as collector:
            fallback = {"url": other.url}
            async with client_of(tmp_path, collector, 503, fallback=fallback) as client:
                reply = await client.post(CHAT, json=BODY)
    assert reply.status_code == 200
    [request] = collector.of_kind("SERVER")
    assert not request.is_error and request.attributes["fakevllm.group.reason"] == "fallback"
    engine, served = collector.of_kind("CLIENT")
    assert engine.is_error and "fakevllm.fallback" not in engine.attributes
    assert engine.attributes["error.type"] == "503"
    assert not served.is_error and served.attributes["fakevllm.fallback"] is True
    assert f"http://127.0.0.1:{served.attributes['server.port']}" == other.url


async def test_a_request_that_must_not_be_stored_has_no_spans(tmp_path: Path) -> None:
    tracing = {"content": True}
    with OtlpCollector() as collector:
        sections = {"tracing": {"url": collector.url} | tracing}
        async with client_of(tmp_path, collector, ANSWER, **sections) as client:
            await client.post(CHAT, json=BODY, headers={"X-Fakevllm-Store": "none"})
            await client.post(CHAT, json=BODY | {"messages": [{"role": "user", "content": "Hi"}]})
            page = await client.get("/metrics")
    assert len(collector.of_kind("SERVER")) == 1
    sent = b"".join(collector.raw)
    assert QUESTION.encode() not in sent and b'"content":"Hi"' in sent and b"Yes." in sent
    assert 'fakevllm_traced_requests{outcome="dropped"} 0.0' in page.text


async def test_without_a_collector_a_request_has_no_trace(tmp_path: Path) -> None:
    with OtlpCollector() as collector:
        async with client_of(tmp_path, collector, ANSWER, tracing={}) as client:
            assert (await client.post(CHAT, json=BODY)).status_code == 200
            page = await client.get("/metrics")
    assert not collector.raw and "fakevllm_traced_requests{" not in page.text
