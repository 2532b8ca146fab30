"""Keep the latest answered model call in memory, so that an admin can inspect it.

The module is used only if the server was started with `--keep-latest-call`. Only one call is kept.
Every running call is recorded until it ends, because it may become the latest answered call. A
running call takes up to two MiB of memory: `MAX_BYTES` for its request and `MAX_BYTES` for its
response.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from fakevllm_adapters.formats.sse import SseDecoder, data_of
from fakevllm_adapters.http.asgi import AsgiApp, Receive, Scope, Send
from fakevllm_adapters.privacy.store_header import NOT_STORED

MAX_BYTES = 2**20
"""Maximum size of a kept request body, and of a kept response body."""


@dataclass(slots=True)
class _Recording:
    """A request body or a response body, recorded chunk by chunk. If a body is larger than
    `MAX_BYTES`, only its size is kept."""

    chunks: list[bytes] = field(default_factory=list[bytes])
    size: int = 0

    def add(self, chunk: bytes) -> None:
        self.size += len(chunk)
        if self.size > MAX_BYTES:
            self.chunks.clear()
        elif chunk:
            self.chunks.append(chunk)

    def as_json(self, *, is_stream: bool = False) -> bytes:
        """Return the recorded body of the request or response as a JSON document.

        A JSON body is returned unchanged. A stream is returned as the list of its events. Any other
        body is returned as text, in a JSON string. For a body that was too large, a message is
        returned in a JSON string.
        """
        if self.size > MAX_BYTES:
            return orjson.dumps(f"{self.size} bytes: larger than the limit of {MAX_BYTES}")
        raw = b"".join(self.chunks)
        document = _event_list(raw) if is_stream else raw
        try:
            orjson.loads(document)
        except orjson.JSONDecodeError:
            return orjson.dumps(raw.decode(errors="replace"))
        return document


@dataclass(frozen=True, slots=True)
class _Call:
    format_name: str
    request: _Recording
    response: _Recording
    is_stream: bool


class LatestCall:
    """Holds the latest model call whose answer had status 200 and was sent completely."""

    def __init__(self) -> None:
        self._latest: _Call | None = None

    def as_json(self) -> bytes | None:
        """Return the latest call as a JSON object with `input` and `output`, or None if no call was
        answered yet.

        If the call's wire format is not chat completions, the object also has the key `format`.
        """
        call = self._latest
        if call is None:
            return None
        is_chat = call.format_name == "chat"
        kind = b"" if is_chat else b',"format":' + orjson.dumps(call.format_name)
        output = call.response.as_json(is_stream=call.is_stream)
        return b'{"input":%b,"output":%b%b}' % (call.request.as_json(), output, kind)

    def record(self, app: AsgiApp, format_name: str) -> AsgiApp:
        """Return an ASGI app that wraps `app`, the endpoint of a wire format. The returned app
        gives the same answers, and also keeps the latest answered call in this LatestCall."""

        async def recording_app(scope: Scope, receive: Receive, send: Send) -> None:
            request, response = _Recording(), _Recording()
            status, is_stream = 0, False

            async def record_receive() -> MutableMapping[str, Any]:
                message = await receive()
                request.add(message.get("body", b""))
                return message

            async def record_send(message: MutableMapping[str, Any]) -> None:
                nonlocal status, is_stream
                if message["type"] == "http.response.start":
                    status = message["status"]
                    is_stream = _is_event_stream(message["headers"])
                else:
                    response.add(message.get("body", b""))
                    is_last = status == 200 and not message.get("more_body", False)
                    if is_last and not scope.get(NOT_STORED):
                        self._latest = _Call(format_name, request, response, is_stream)
                await send(message)

            await app(scope, record_receive, record_send)

        return recording_app


def _is_event_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    return dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")


def _event_list(raw: bytes) -> bytes:
    """Return a JSON list with the data of each event in a stream. The bytes of the data are not
    changed."""
    events = [data_of(event) for event in SseDecoder().feed(raw)]
    return b"[" + b",".join(data for data in events if data is not None) + b"]"
