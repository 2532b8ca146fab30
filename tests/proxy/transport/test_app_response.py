"""The app's stream: opened late, kept alive, always ended."""

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
    """What an ASGI server was given."""

    def __init__(self) -> None:
        self.messages: list[MutableMapping[str, Any]] = []
        self.grew = asyncio.Event()

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.messages.append(message)
        self.grew.set()

    async def has(self, count: int) -> None:
        """Returns when that many messages have come."""
        while len(self.messages) < count:
            self.grew.clear()
            await self.grew.wait()

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])


def reply_to(sent: Sent, *, streamed: bool = True) -> AppResponse:
    adapter = ADAPTERS["chat"]
    return AppResponse(sent, adapter, adapter.open({"stream": streamed}, EngineInfo()))


async def test_a_quick_answer_goes_out_as_it_came() -> None:
    sent = Sent()
    async with reply_to(sent) as app:
        await app.answer(STREAM)
    assert (sent.status, sent.body) == (200, STREAM.body)


async def test_a_slow_stream_is_opened_and_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_response, "GRACE_S", 0.01)
    monkeypatch.setattr(app_response, "KEEP_ALIVE_EVERY_S", 0.01)
    sent = Sent()
    async with reply_to(sent) as app:
        await sent.has(3)
        await app.answer(STREAM)
    assert sent.body.startswith(KEEP_ALIVE * 2)
    assert sent.body.endswith(STREAM.body)
    assert not sent.messages[-1].get("more_body")


async def test_a_stream_that_flows_gets_no_keep_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_response, "GRACE_S", 0.01)
    sent = Sent()
    async with reply_to(sent) as app:
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
    async with reply_to(sent, streamed=False) as app:
        await sent.has(2)
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
    async with reply_to(sent, streamed=False) as app:
        await sent.has(2)
        await app.refuse(unavailable("later"))
    assert orjson.loads(sent.body)["error"]["message"] == "later"


async def test_an_error_after_the_stream_is_open_ends_it_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app_response, "GRACE_S", 0.01)
    sent = Sent()
    async with reply_to(sent) as app:
        await sent.has(2)
        await app.send_body(400, REFUSED.body, REFUSED.headers)
    assert sent.status == 200
    assert sent.body.endswith(b'data: {"error":{}}\n\n' + DONE)


async def test_a_stream_mixed_up_with_json_is_refused_for_good() -> None:
    sent = Sent()
    async with reply_to(sent) as app:
        await app.answer(WHOLE)
    assert sent.status == 400


async def test_a_stream_that_is_done_without_a_finish_reason_gets_one() -> None:
    sent = Sent()
    async with reply_to(sent) as app:
        await app.answer(replace(STREAM, body=b'data: {"id":"c","choices":[{}]}\n\n' + DONE))
    *_, end, done, _ = sent.body.split(b"\n\n")
    assert orjson.loads(end[6:])["choices"][0]["finish_reason"] == "stop"
    assert (orjson.loads(end[6:])["id"], done) == ("c", b"data: [DONE]")


async def test_a_stream_that_is_done_without_a_choice_ends_in_an_error() -> None:
    sent = Sent()
    async with reply_to(sent) as app:
        await app.answer(replace(STREAM, body=b'data: {"id":"c","choices":[]}\n\n' + DONE))
    assert b'"error"' in sent.body and sent.body.endswith(DONE)


async def test_a_stream_that_breaks_off_ends_in_an_error() -> None:
    sent = Sent()
    async with reply_to(sent) as app:
        await app.answer(replace(STREAM, body=b'data: {"choices":[]}\n\n'))
    assert b'"error"' in sent.body and sent.body.endswith(DONE)


async def test_an_error_within_the_grace_is_a_status() -> None:
    sent = Sent()
    async with reply_to(sent) as app:
        await app.refuse(unavailable("later"))
    assert sent.status == 503
    assert (b"retry-after", b"2") in sent.messages[0]["headers"]


async def test_what_is_held_back_behind_the_block_says_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app_response, "WHITE_SPACE_AFTER_S", 0.0)
    monkeypatch.setattr(app_response, "KEEP_ALIVE_EVERY_S", 0.001)
    sent = Sent()
    async with reply_to(sent) as app:
        pass
    app.postpone_start()
    app.on_keep_alive_due()
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not sent.messages
