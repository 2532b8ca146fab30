"""The bytes that the pipeline sends upstream and to the app."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from fakevllm.config.model import Config
from fakevllm.groups.group_record import NOT_SHOWN, GroupDraft
from fakevllm.groups.request_pipeline import Pipeline
from fakevllm.groups.resend_cache import ResendCache
from fakevllm.ledger.store import Ledger
from fakevllm.metrics import Metrics
from fakevllm.settlement.reward_delivery import Delivery
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm.transport.engine_client import EngineClient, EngineResponse, LiveResponse
from fakevllm.transport.request import Request, SiblingPlan, sample
from fakevllm.transport.retry_handler import RetryHandler
from fakevllm_adapters.formats.base import EngineInfo
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.formats.sse import DONE
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import Task

ADAPTER = ADAPTERS["chat"]
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
NOWHERE = "http://127.0.0.1:9"
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'


class FixedEngine(EngineClient):
    """An engine that answers with fixed chunks, or never."""

    def __init__(self, chunks: list[bytes], *, hangs: bool = False) -> None:
        super().__init__(NOWHERE, None)
        self.chunks = chunks
        self.hangs = hangs
        self.is_streamed = asyncio.Event()
        self.headers: list[Mapping[str, str]] = []

    async def call(self, path: str, body: bytes, headers: Mapping[str, str]) -> EngineResponse:
        self.headers.append(headers)
        return EngineResponse(200, [], b"".join(self.chunks), True, 0.0)

    @asynccontextmanager
    async def live(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[LiveResponse]:
        yield LiveResponse(200, [(b"content-type", b"text/event-stream")], True, self._drip())

    async def _drip(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            yield chunk
        self.is_streamed.set()
        if self.hangs:
            await asyncio.Event().wait()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


@asynccontextmanager
async def running(upstream: FixedEngine, ledger: Ledger) -> AsyncGenerator[Pipeline]:
    link = SwarmLink(NOWHERE, None, TrainJob(), ledger)
    pipeline = Pipeline(
        Config(),
        upstream,
        None,
        ledger,
        Delivery(ledger, link),
        RetryHandler(upstream),
        ResendCache(0, ledger.kept_answers),
        Metrics(),
    )
    try:
        yield pipeline
    finally:
        await pipeline.close()
        await link.close()
        await upstream.close()


def request(**headers: str) -> Request:
    return Request("r1", ADAPTER, b"{}", b"{}", ADAPTER.open(dict(BODY), EngineInfo()), headers)


async def never_disconnects() -> MutableMapping[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError("the app never disconnects")


async def handle_request(pipeline: Pipeline, sent: list[MutableMapping[str, Any]]) -> None:
    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    app_request = request()
    await pipeline.handle(GroupDraft(app_request, Task(), "", None), never_disconnects, send)


def body_of(sent: list[MutableMapping[str, Any]]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


async def test_an_end_of_stream_in_single_byte_chunks_is_recognized(ledger: Ledger) -> None:
    chunks = [EVENT, *(bytes([byte]) for byte in DONE)]
    sent: list[MutableMapping[str, Any]] = []
    async with running(FixedEngine(chunks), ledger) as pipeline:
        await handle_request(pipeline, sent)
    assert body_of(sent) == EVENT + DONE
    assert ledger.drain()
    record = ledger.group("r1")
    assert record is not None and record.state == "served"


async def test_a_stop_ends_an_open_stream_with_an_error_and_a_row_in_the_ledger(
    ledger: Ledger,
) -> None:
    upstream = FixedEngine([EVENT], hangs=True)
    sent: list[MutableMapping[str, Any]] = []
    async with running(upstream, ledger) as pipeline:
        task = asyncio.create_task(handle_request(pipeline, sent))
        await upstream.is_streamed.wait()
        task.cancel()  # uvicorn cancels the request right before the pipeline is closed
        await pipeline.close()
        await task
    body = body_of(sent)
    assert body.startswith(EVENT) and b"The proxy is stopping" in body and body.endswith(DONE)
    assert sent[-1]["more_body"] is False
    assert ledger.drain()
    record = ledger.group("r1")
    assert record is not None and (record.state, record.reason) == ("failed", "proxy_stopped")


async def test_each_sibling_has_its_own_request_id() -> None:
    upstream = FixedEngine([EVENT, DONE])
    app_request = request(**{"X-Request-Id": "abc"})
    for index in range(3):
        await sample(upstream, app_request, SiblingPlan(3), index, 1.0)
    ids = sorted(headers["X-Request-Id"] for headers in upstream.headers)
    assert ids == ["abc", "abc-1", "abc-2"]
    await upstream.close()


class UnstreamedEngine(FixedEngine):
    """An engine that answers with one body instead of a stream."""

    @asynccontextmanager
    async def live(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[LiveResponse]:
        yield LiveResponse(200, [(b"content-type", b"application/json")], False, self._drip())


async def test_an_answer_that_cannot_be_translated_is_recorded_as_not_served(
    ledger: Ledger,
) -> None:
    call: dict[str, Any] = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": '},
    }
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    answer = {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice]}
    adapter = ADAPTERS["messages"]
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    request_ = Request("r1", adapter, b"{}", b"{}", adapter.open(body, EngineInfo()), {})
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async with running(UnstreamedEngine([orjson.dumps(answer)]), ledger) as pipeline:
        await pipeline.handle(GroupDraft(request_, Task(), "", None), never_disconnects, send)
    assert sent[0]["status"] == 500 and ledger.drain()
    record = ledger.group("r1")
    assert record is not None
    assert (record.state, record.reason, record.status) == ("failed", NOT_SHOWN, 500)
