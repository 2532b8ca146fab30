"""The ASGI interface in the few words the hot paths need. Pure: it awaits what it is given and
opens nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, cast

import orjson

from fakevllm_adapters.protocol.errors import WireError, error_body

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

MAX_BODY_BYTES = 32 * 2**20
"""The limit of vLLM's own Rust frontend."""

_HOP_BY_HOP = (
    "connection keep-alive proxy-authenticate proxy-authorization te trailer "
    "transfer-encoding upgrade"
)
_NOT_RELAYED = {*_HOP_BY_HOP.split(), "content-length", "content-encoding", "date", "server"}
"""Headers of one connection only, and those our own server writes."""


_FOR_ENGINES = {b"content-type": "Content-Type", b"x-request-id": "X-Request-Id"}
"""Request headers an engine may see. Keys and engine controls of clients are not among them."""


class ClientLeft(Exception):
    """There is nobody to answer any more."""


class Door:
    """A callable Starlette's Route takes for an ASGI endpoint; it would call a plain function with
    a Request."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def header_map(scope: Scope) -> dict[bytes, bytes]:
    """Header names are lower case in ASGI; of a repeated one the last counts."""
    return dict(scope["headers"])


def engine_headers(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Those of a client's headers that go on to an engine."""
    return {
        name: headers[key].decode("latin-1") for key, name in _FOR_ENGINES.items() if key in headers
    }


def json_object(raw: bytes) -> dict[str, Any] | None:
    """The body's JSON object, None where it is none: an engine words that error better than a
    relay could."""
    try:
        value: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def error_object(raw: bytes) -> dict[str, Any] | None:
    """An upstream's error body, None where it is none that can be told again."""
    found = json_object(raw)
    try:
        orjson.dumps(found)
    except TypeError:  # nested deeper than orjson writes
        return None
    return found


def is_final(status: int) -> bool:
    """Whether an engine may answer a call with it: neither a redirect, nor a status that has no
    body, nor one that HTTP does not know."""
    return status in (200, 201, 202, 203) or 400 <= status < 600


async def read_body(receive: Receive, limit: int = MAX_BODY_BYTES) -> bytes:
    """The whole request body. Raises WireError (413) beyond `limit` bytes, ClientLeft when
    the client left."""
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft("the client left before its request was complete")
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_large(limit)
        chunks.append(chunk)
        more = message.get("more_body", False)
    return b"".join(chunks)


def too_large(limit: int) -> WireError:
    text = f"The request body is larger than {limit} bytes."
    return WireError(413, error_body(text, "Request Entity Too Large", 413))


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client has left. Only after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_bytes(send: Send, status: int, body: bytes, headers: Headers) -> None:
    lengths = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": lengths})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, value: object) -> None:
    await send_bytes(send, status, orjson.dumps(value), [(b"content-type", b"application/json")])


async def send_error(send: Send, error: WireError) -> None:
    headers = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    await send_bytes(send, error.status, orjson.dumps(error.body), headers)


async def start_stream(send: Send, status: int, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_chunk(send: Send, chunk: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": not last})


def relayed_headers(headers: Iterable[tuple[str, str]]) -> Headers:
    """An upstream's answer headers as they go on to the client, their bytes as they came."""
    return [
        (name.lower().encode("latin-1"), value.encode("utf-8", "surrogateescape"))
        for name, value in headers
        if name.lower() not in _NOT_RELAYED
    ]
