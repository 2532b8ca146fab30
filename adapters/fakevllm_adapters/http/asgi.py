"""Functions that read requests and write responses directly through ASGI, where a web framework
would be too slow.

The functions await only the `receive` and `send` callables that they get, and open no connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, cast

import orjson

from fakevllm_adapters.protocol.errors import WireError, error_body
from fakevllm_adapters.protocol.outage_reasons import REASON_HEADER, OutageReason
from fakevllm_adapters.protocol.separate_prompts import PROMPTS_HEADER

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

MAX_BODY_BYTES = 32 * 2**20
"""Default limit on a request body, in bytes. vLLM's Rust frontend has the same limit."""

_HOP_BY_HOP = (
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade"
)
_NOT_RELAYED = {
    *_HOP_BY_HOP.split(),
    b"content-length",
    b"content-encoding",
    b"date",
    b"server",
    REASON_HEADER.lower().encode(),
    PROMPTS_HEADER.lower().encode(),
}
"""Response headers that are not relayed. Some are valid for one connection only, and some are
written by this process's own HTTP server. The header with the reason of an outage is for proxies
and never for apps."""


_FOR_ENGINES = {b"content-type": "Content-Type", b"x-request-id": "X-Request-Id"}
"""Request headers that are relayed to an engine. API keys and headers that control an engine are
not among them."""


class ClientDisconnected(Exception):
    """Error for a client that has disconnected, so that no response is needed."""


class AsgiEndpoint:
    """An ASGI app that calls a function of (scope, receive, send).

    Starlette's Route treats an object of this class as an ASGI app. If Starlette got a plain
    function, it would call the function with a Request object instead.
    """

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def header_map(scope: Scope) -> dict[bytes, bytes]:
    """Return the request headers as a dict with lower-case names. If a header is repeated, the last
    value counts."""
    return dict(scope["headers"])


def engine_headers(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the client's request headers that are relayed to an engine. All other headers are left
    out."""
    return {
        name: headers[key].decode("latin-1") for key, name in _FOR_ENGINES.items() if key in headers
    }


def json_object(raw: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a request body, or None if the body is not a JSON object.

    If the result is None, the caller should relay the body to the engine unchanged. The engine then
    writes the error message.
    """
    try:
        value: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def error_object(raw: bytes) -> dict[str, Any] | None:
    """Return the JSON object in an error body of the engine.

    Return None if the body is not a JSON object. Also return None if the object is nested so deeply
    that orjson cannot write it again.
    """
    body = json_object(raw)
    try:
        orjson.dumps(body)
    except TypeError:  # nested deeper than orjson writes
        return None
    return body


def is_final_status(status: int) -> bool:
    """Return True if a response with this HTTP status can be the answer to a call.

    The result is False for redirects, for statuses without a response body, and for statuses that
    HTTP does not define.
    """
    return status in (200, 201, 202, 203) or 400 <= status < 600


async def read_body(receive: Receive, limit: int = MAX_BODY_BYTES) -> bytes:
    """Read the whole request body, and return it.

    Raises WireError (413) if the body has more than `limit` bytes. Raises ClientDisconnected if the
    client disconnects before the end of the body.
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
    """Build the error (413) for a body of more than `limit` bytes."""
    text = f"The request body is larger than {limit} bytes."
    return WireError(413, error_body(text, "Request Entity Too Large", 413))


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected. Call this function only after the request body was
    read, because it discards everything that the client sends."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_bytes(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Send a whole response. A content-length header is added to `headers`."""
    lengths = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": lengths})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, value: object) -> None:
    """Send a value as a whole JSON response."""
    await send_bytes(send, status, orjson.dumps(value), [(b"content-type", b"application/json")])


def reason_headers(reason: OutageReason | None) -> Headers:
    """Return a list with the response header that names the reason of an outage. Return [] if
    `reason` is None."""
    return [] if reason is None else [(REASON_HEADER.lower().encode(), reason.encode())]


async def send_error(send: Send, error: WireError, *, with_reason: bool = False) -> None:
    """Send an error response, with a `Retry-After` header if the error has a retry time.

    `with_reason` adds a header with the machine-readable reason of an outage. Only the swarm
    server, which trains the model, sets this flag. A proxy never shows the header to an app.
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


def send_chunk(send: Send, chunk: bytes, *, last: bool = False) -> Awaitable[None]:
    """Send a part of a streamed response. `last` is True for the part that ends the response."""
    return send({"type": "http.response.body", "body": chunk, "more_body": not last})


def relayed_headers(raw_headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers of the engine's response that are relayed to the client unchanged."""
    return [
        (lower, value) for name, value in raw_headers if (lower := name.lower()) not in _NOT_RELAYED
    ]
