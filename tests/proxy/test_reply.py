"""The app's stream: opened late, kept alive, always ended."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from fakevllm import reply as module
from fakevllm.reply import AppReply
from fakevllm.upstream import Reply
from fakevllm_adapters.errors import unavailable
from fakevllm_adapters.sse import DONE, KEEP_ALIVE

STREAM = Reply(200, [(b"content-type", b"text/event-stream")], b"data: 1\n\n" + DONE, True, 0.1)
REFUSED = Reply(400, [(b"content-type", b"application/json")], b'{"error": {}}', False, 0.1)


class Sent:
    """What an ASGI server was given."""

    def __init__(self) -> None:
        self.messages: list[MutableMapping[str, Any]] = []
        self.grew = asyncio.Event()

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.messages.append(message)
        self.grew.set()

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])


async def later(sent: Sent, result: Reply) -> Reply:
    """Ends after the app has been kept waiting."""
    await sent.grew.wait()
    return result


async def test_a_quick_answer_goes_out_as_it_came() -> None:
    sent = Sent()
    await AppReply(sent, streamed=True).answer(STREAM)
    assert (sent.status, sent.body) == (200, STREAM.body)


async def test_a_slow_stream_is_opened_and_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.01)
    sent = Sent()
    app = AppReply(sent, streamed=True)
    await app.answer(await app.wait_for(asyncio.create_task(later(sent, STREAM))))
    assert sent.body.startswith(KEEP_ALIVE)
    assert sent.body.endswith(STREAM.body)
    assert not sent.messages[-1].get("more_body")


async def test_an_error_after_the_stream_is_open_ends_it_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.01)
    sent = Sent()
    app = AppReply(sent, streamed=True)
    await app.answer(await app.wait_for(asyncio.create_task(later(sent, REFUSED))))
    assert sent.status == 200
    assert sent.body.endswith(b'data: {"error": {}}\n\n' + DONE)


async def test_an_error_within_the_grace_is_a_status() -> None:
    sent = Sent()
    await AppReply(sent, streamed=True).refuse(unavailable("later"))
    assert sent.status == 503
    assert (b"retry-after", b"2") in sent.messages[0]["headers"]
