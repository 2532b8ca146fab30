"""Read the ids of responses from requests, and from the bytes that are sent to a client."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, cast

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.formats.json_strings import find_string
from fakevllm_adapters.http.asgi import Send
from fakevllm_adapters.http.json_body import parse_as_vllm

MAX_SCANNED_BYTES = 64 * 1024
"""Number of bytes of an answer in which the id is looked for. vLLM writes the id first."""
_ID_PATHS = frozenset({(b"id",), (b"response", b"id")})
"""Where the id is in a whole answer, and in the events of a stream."""


def previous_response_id_of(raw: bytes, body: Json | None) -> str | None:
    """Return the `previous_response_id` of a request, or None if the request has none.

    `body` is the parsed request. If `body` is None, `raw` is parsed in the way that vLLM parses a
    request.

    >>> previous_response_id_of(b'{"previous_response_id": "resp_1", "top_p": NaN}', None)
    'resp_1'
    """
    request = body if body is not None else parse_as_vllm(raw)
    if not isinstance(request, dict):
        return None
    response_id: object = cast(Json, request).get("previous_response_id")
    return response_id if isinstance(response_id, str) else None


def watch_response_id(send: Send, on_response_id: Callable[[str], None]) -> Send:
    """Return an ASGI `send` that calls `on_response_id` before the client gets the id of a
    response.

    The callback is called at most once, and only for an answer of status 200.
    """
    status, seen, is_done = 0, b"", False

    async def watched(message: MutableMapping[str, Any]) -> None:
        nonlocal status, seen, is_done
        if message["type"] == "http.response.start":
            status = message["status"]
        elif not is_done and status == 200:
            seen += message.get("body", b"")
            span = find_string(seen, _ID_PATHS)
            is_done = span is not None or len(seen) > MAX_SCANNED_BYTES
            if span is not None:
                on_response_id(seen[slice(*span)].decode(errors="replace"))
            seen = b"" if is_done else seen
        await send(message)

    return watched
