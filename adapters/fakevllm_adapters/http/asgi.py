"""Functions that read requests and write responses directly through ASGI, for the hot paths.

They await only the `receive` and `send` callables that they get, and open no connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, cast

import orjson

from fakevllm_adapters.protocol.errors import WireError, error_body
from fakevllm_adapters.protocol.outage_reasons import REASON_HEADER, OutageReason

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

MAX_BODY_BYTES = 32 * 2**20
"""Default limit of a request body; the limit of vLLM's Rust frontend."""

_HOP_BY_HOP = (
    "connection keep-alive proxy-authenticate proxy-authorization te trailer "
    "transfer-encoding upgrade"
)
_NOT_RELAYED = {
    *_HOP_BY_HOP.split(),
    "content-length",
    "content-encoding",
    "date",
    "server",
    REASON_HEADER.lower(),
}
"""Headers of one connection only, those that our own server writes, and the reason header, which
is for proxies and never for apps."""


_FOR_ENGINES = {b"content-type": "Content-Type", b"x-request-id": "X-Request-Id"}
"""Request headers that are relayed to an engine. API keys and headers that control an engine are
not among them."""


class ClientDisconnected(Exception):
    """Error: the client has disconnected, so nobody waits for the response."""


class AsgiEndpoint:
    """A wrapper that makes Starlette's Route treat a function as an ASGI app.

    Without this wrapper, Route would call the function with a Request object.
    """

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def header_map(scope: Scope) -> dict[bytes, bytes]:
    """Return the request headers by lower-case name. If a header is repeated, the last value
    counts."""
    return dict(scope["headers"])


def engine_headers(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the client's headers that are relayed to an engine."""
    return {
        name: headers[key].decode("latin-1") for key, name in _FOR_ENGINES.items() if key in headers
    }


def json_object(raw: bytes) -> dict[str, Any] | None:
    """Parse a request body; return None if it is not a JSON object.

    The relay sends a body that is not a JSON object to the engine unchanged, because the engine
    then describes the problem in its own error message.
    """
    try:
        value: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def error_object(raw: bytes) -> dict[str, Any] | None:
    """Parse an upstream's error body.

    Return None if the body is not a JSON object, or has values that orjson cannot write.
    """
    body = json_object(raw)
    try:
        orjson.dumps(body)
    except TypeError:  # nested deeper than orjson writes
        return None
    return body


def is_final_status(status: int) -> bool:
    """Return whether an engine's response to a call may have this status.

    Redirects, statuses without a body, and statuses that HTTP does not define are excluded.
    """
    return status in (200, 201, 202, 203) or 400 <= status < 600


async def read_body(receive: Receive, limit: int = MAX_BODY_BYTES) -> bytes:
    """Receive and return the whole request body.

    Raises WireError (413) for more than `limit` bytes, and ClientDisconnected if the client
    disconnects before the end of the body.
    """
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the client disconnected before its request was complete")
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_large(limit)
        chunks.append(chunk)
        more = message.get("more_body", False)
    return b"".join(chunks)


def too_large(limit: int) -> WireError:
    """Build the 413 for a body of more than `limit` bytes."""
    text = f"The request body is larger than {limit} bytes."
    return WireError(413, error_body(text, "Request Entity Too Large", 413))


async def wait_for_disconnect(receive: Receive) -> None:
    """Return once the client has disconnected. Call it only after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_bytes(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Send a whole response; its content-length is added to the headers."""
    lengths = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": lengths})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, value: object) -> None:
    """Send a value as a whole JSON response."""
    await send_bytes(send, status, orjson.dumps(value), [(b"content-type", b"application/json")])


def reason_headers(reason: OutageReason | None) -> Headers:
    """Return a list with the reason header, or an empty list if there is no reason."""
    return [] if reason is None else [(REASON_HEADER.lower().encode(), reason.encode())]


async def send_error(send: Send, error: WireError, *, with_reason: bool = False) -> None:
    """Send an error response, with `Retry-After` if the error has one.

    Only the swarm server sets `with_reason`: a proxy never shows the reason header to an app.
    """
    headers = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if with_reason:
        headers += reason_headers(error.reason)
    await send_bytes(send, error.status, orjson.dumps(error.body), headers)


async def start_stream(send: Send, status: int, headers: Headers) -> None:
    """Send the status and headers of a streamed response."""
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_chunk(send: Send, chunk: bytes, *, last: bool = False) -> None:
    """Send a part of a streamed response; `last` ends the response."""
    await send({"type": "http.response.body", "body": chunk, "more_body": not last})


def relayed_headers(headers: Iterable[tuple[str, str]]) -> Headers:
    """Return those of the upstream's response headers that are relayed to the client unchanged."""
    return [
        (name.lower().encode("latin-1"), value.encode("utf-8", "surrogateescape"))
        for name, value in headers
        if name.lower() not in _NOT_RELAYED
    ]
