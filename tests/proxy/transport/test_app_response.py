"""The response to the app: its delayed start, its keep-alives, its end."""

import asyncio
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

import orjson
import pytest

from fakevllm.transport import app_response
from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.engine_client import EngineResponse
from fakevllm_adapters.formats.base import EngineInfo
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.formats.sse import DONE, KEEP_ALIVE
from fakevllm_adapters.protocol.errors import unavailable

ENDED = b'data: {"choices":[{"finish_reason":"stop"}]}\n\n' + DONE
STREAM = EngineResponse(200, [(b"content-type", b"text/event-stream")], ENDED, True, 0.1)
WHOLE = EngineResponse(
    200, [(b"content-type", b"application/json")], b'{"choices": [{}]}', False, 0.1
)
REFUSED = EngineResponse(
    400, [(b"content-type", b"application/json")], b'{"error": {}}', False, 0.1
)


class Sent:
    """The ASGI messages that were sent."""

    def __init__(self) -> None:
        self.messages: list[MutableMapping[str, Any]] = []
        self.message_added = asyncio.Event()

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.messages.append(message)
        self.message_added.set()

    async def wait_for(self, count: int) -> None:
        """Wait until at least `count` messages have been sent."""
        while len(self.messages) < count:
            self.message_added.clear()
            await self.message_added.wait()

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])


def response_to(sent: Sent, *, streamed: bool = True) -> AppResponse:
    adapter = ADAPTERS["chat"]
    return AppResponse(sent, adapter, adapter.open({"stream": streamed}, EngineInfo()))


async def test_a_quick_answer_is_sent_unchanged() -> None:
    sent = Sent()
    async with response_to(sent) as app:
        await app.answer(STREAM)
    assert (sent.status, sent.body) == (200, STREAM.body)


async def test_a_slow_stream_is_opened_and_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_response, "GRACE_S", 0.01)
    monkeypatch.setattr(app_response, "KEEP_ALIVE_EVERY_S", 0.01)
    sent = Sent()
    async with response_to(sent) as app:
        await sent.wait_for(3)
        await app.answer(STREAM)
    assert sent.body.startswith(KEEP_ALIVE * 2)
    assert sent.body.endswith(STREAM.body)
    assert not sent.messages[-1].get("more_body")


async def test_a_stream_with_data_gets_no_keep_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_response, "GRACE_S", 0.01)
    sent = Sent()
    async with response_to(sent) as app:
        await app.open([])
        await app.write(b"data: 1\n\n")
        app.on_keep_alive_due()
        await app.write(DONE, last=True)
    assert sent.body == b"data: 1\n\n" + DONE


async def test_a_slow_whole_answer_is_kept_alive_with_white_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app_response, "WHITE_SPACE_AFTER_S", 0.01)
    sent = Sent()
    async with response_to(sent, streamed=False) as app:
        await sent.wait_for(2)
        await app.answer(WHOLE)
    assert (sent.status, orjson.loads(sent.body)) == (200, {"choices": [{}]})
    assert sent.body.startswith(b" ") and dict(sent.messages[0]["headers"]) == {
        b"content-type": b"application/json"
    }


async def test_an_error_after_the_white_space_is_in_vllms_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app_response, "WHITE_SPACE_AFTER_S", 0.01)
    sent = Sent()
    async with response_to(sent, streamed=False) as app:
        await sent.wait_for(2)
        await app.refuse(unavailable("later"))
    assert orjson.loads(sent.body)["error"]["message"] == "later"


async def test_an_error_after_the_start_of_a_stream_ends_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app_response, "GRACE_S", 0.01)
    sent = Sent()
    async with response_to(sent) as app:
        await sent.wait_for(2)
        await app.send_body(400, REFUSED.body, REFUSED.headers)
    assert sent.status == 200
    assert sent.body.endswith(b'data: {"error":{}}\n\n' + DONE)


async def test_json_in_place_of_a_stream_is_refused_with_a_permanent_error() -> None:
    sent = Sent()
    async with response_to(sent) as app:
        await app.answer(WHOLE)
    assert sent.status == 400


async def test_a_stream_that_is_done_without_a_finish_reason_gets_one() -> None:
    sent = Sent()
    async with response_to(sent) as app:
        await app.answer(replace(STREAM, body=b'data: {"id":"c","choices":[{}]}\n\n' + DONE))
    *_, end, done, _ = sent.body.split(b"\n\n")
    assert orjson.loads(end[6:])["choices"][0]["finish_reason"] == "stop"
    assert (orjson.loads(end[6:])["id"], done) == ("c", b"data: [DONE]")


async def test_a_stream_that_is_done_without_a_choice_ends_in_an_error() -> None:
    sent = Sent()
    async with response_to(sent) as app:
        await app.answer(replace(STREAM, body=b'data: {"id":"c","choices":[]}\n\n' + DONE))
    assert b'"error"' in sent.body and sent.body.endswith(DONE)


async def test_a_stream_that_breaks_off_ends_in_an_error() -> None:
    sent = Sent()
    async with response_to(sent) as app:
        await app.answer(replace(STREAM, body=b'data: {"choices":[]}\n\n'))
    assert b'"error"' in sent.body and sent.body.endswith(DONE)


async def test_an_error_within_the_grace_period_is_a_status() -> None:
    sent = Sent()
    async with response_to(sent) as app:
        await app.refuse(unavailable("later"))
    assert sent.status == 503
    assert (b"retry-after", b"2") in sent.messages[0]["headers"]


async def test_a_closed_response_sends_no_keep_alives_after_a_postponed_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app_response, "WHITE_SPACE_AFTER_S", 0.0)
    monkeypatch.setattr(app_response, "KEEP_ALIVE_EVERY_S", 0.001)
    sent = Sent()
    async with response_to(sent) as app:
        pass
    app.postpone_start()
    app.on_keep_alive_due()
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not sent.messages
