"""The latest call to the model that was answered, for an admin who looks into what goes wrong. In
memory only, one of all, and each part of it only up to a bound."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from fakevllm_adapters.formats.sse import SseDecoder, data_of
from fakevllm_adapters.http.asgi import AsgiApp, Receive, Scope, Send

MAX_BYTES = 2**20
"""Of what was asked, and of what was answered."""


@dataclass(slots=True)
class _Kept:
    chunks: list[bytes] = field(default_factory=list[bytes])
    size: int = 0

    def add(self, chunk: bytes) -> None:
        self.size += len(chunk)
        if self.size > MAX_BYTES:
            self.chunks.clear()
        elif chunk:
            self.chunks.append(chunk)

    def told(self, *, is_stream: bool = False) -> bytes:
        """As JSON: its own bytes where they are JSON, the list of its events where it streamed."""
        if self.size > MAX_BYTES:
            return orjson.dumps(f"{self.size} bytes: more than the {MAX_BYTES} that are kept")
        raw = b"".join(self.chunks)
        own = _events(raw) if is_stream else raw
        try:
            orjson.loads(own)
        except orjson.JSONDecodeError:
            return orjson.dumps(raw.decode(errors="replace"))
        return own


class LatestCall:
    def __init__(self) -> None:
        self._latest: tuple[str, _Kept, _Kept, bool] | None = None
        """Format, question, answer, whether that streamed."""

    def as_json(self) -> bytes | None:
        """None: nobody has asked yet. Chat completions are told without a format."""
        if self._latest is None:
            return None
        name, asked, answered, is_stream = self._latest
        kind = b"" if name == "chat" else b',"format":' + orjson.dumps(name)
        output = answered.told(is_stream=is_stream)
        return b'{"input":%b,"output":%b%b}' % (asked.told(), output, kind)

    def watching(self, door: AsgiApp, name: str) -> AsgiApp:
        """The door of a format, whose answered calls are kept here one after the other."""

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            asked, answered = _Kept(), _Kept()
            status, is_stream = 0, False

            async def hears() -> MutableMapping[str, Any]:
                message = await receive()
                asked.add(message.get("body", b""))
                return message

            async def says(message: MutableMapping[str, Any]) -> None:
                nonlocal status, is_stream
                if message["type"] == "http.response.start":
                    status = message["status"]
                    is_stream = _is_stream(message["headers"])
                else:
                    answered.add(message.get("body", b""))
                    if status == 200 and not message.get("more_body", False):
                        self._latest = name, asked, answered, is_stream
                await send(message)

            await door(scope, hears, says)

        return watched


def _is_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    return dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")


def _events(raw: bytes) -> bytes:
    found = [data_of(event) for event in SseDecoder().feed(raw)]
    return b"[" + b",".join(data for data in found if data is not None) + b"]"
